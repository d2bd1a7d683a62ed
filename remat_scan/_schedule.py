"""Finding layers in a compiled program: what became of each, and in what order they run."""

import itertools
import re
from collections.abc import Sequence

from ._hlo import _CALLED, Module, _Instruction
from ._isolation import LOOP_TAG
from ._regions import MARKED, Region

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MATMUL_OPS = ("dot", "convolution", "ragged-dot")
_MATMUL_CALLS = re.compile(
    r'custom_call_target="[^"]*(gemm|matmul|conv|dot|cudnn|triton|tpu_custom)'
)
# What a scheduler may move at will: it computes nothing, or it fetches what is needed later.
_NO_WORK = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "copy-start",
     "copy-done", "broadcast", "iota", "reshape", "transpose", "slice", "convert", "after-all",
     "domain", "partition-id", "replica-id", "opt-barrier", "optimization-barrier"}
)  # fmt: skip
_MOVES = re.compile(r"^(all|reduce-scatter|collective|async|send|recv|copy|slice|dynamic)")


class Schedule:
    """Which instruction of a scheduled program belongs to which region, and in what order."""

    def __init__(self, text: str, regions: Sequence[Region]) -> None:
        self._module = Module(text)
        self._regions = regions
        self._owners: dict[int, list[int]] = {}
        self._find_owners()
        self._instructions = [
            (i, region, _op_name(i))
            for c in self._module._computations.values()
            for i in c
            for region in self._owners.get(id(i), ())
        ]
        self.mixed: dict[int, tuple[_Instruction, int]] = {}
        self.late: dict[int, list[tuple[_Instruction, int]]] = {}
        for instructions in self._module._computations.values():
            self._read_order(instructions)

    def _find_owners(self) -> None:
        """Which regions each instruction works for: one, or several where they share a computation.

        The names inside a loop's body can't be taken at their word. Layers alike are calls of one
        function, and where XLA inlines these before it has copied the body for each, it puts the name
        of every call in front of all that is inside. The loop's own name is right.
        """
        computations = self._module._computations
        called = {n for c in computations.values() for i in c for n in _called(i)}
        todo: list[tuple[str, int | None]] = [(n, None) for n in computations if n not in called]
        seen = set(todo)
        while todo:
            name, caller = todo.pop()
            for ins in computations.get(name, ()):
                owner = self._resolve([int(m) for m in MARKED.findall(_op_name(ins))], caller)
                if owner is not None:
                    owners = self._owners.setdefault(id(ins), [])
                    if owner not in owners:
                        owners.append(owner)
                context = caller if owner is None else owner
                new = {(n, context) for n in _called(ins)} - seen
                seen |= new
                todo += sorted(new, key=str)

    def _resolve(self, marks: list[int], caller: int | None) -> int | None:
        """The region that an instruction's name means, inside what an instruction of `caller` calls."""
        if not marks:
            return None
        inside = [m for m in marks if caller is not None and self._is_within(m, caller)]
        return (inside or marks)[-1]

    def _is_within(self, number: int, outer: int) -> bool:
        at: int | None = number
        while at is not None and at != outer:
            at = self._regions[at].parent
        return at == outer

    def line(self, instruction: _Instruction) -> str:
        return self._module._frames.line(instruction.rest)

    def title(self, number: int) -> str:
        region = self._regions[number]
        return f"the {region.phase} pass of another layer ({region.name}, {region.source})"

    def loops(self, number: int) -> tuple[int, _Instruction | None]:
        """How many tagged loops stand for a region, and one without a tag."""
        tagged, untagged = 0, None
        for ins, region, name in self._instructions:
            if ins.opcode == "while" and region == number:
                inside = MARKED.split(name)[-1].split("/")
                if inside[-1] == "while" and inside.count("while") == 1:
                    if LOOP_TAG in ins.rest:
                        tagged += 1
                    else:
                        untagged = ins
        return tagged, untagged

    def matmuls(self, number: int, again: bool = True) -> int:
        names = [
            (ins, name)
            for ins, region, name in self._instructions
            if region == number and ("rematted_computation" in name) == again
        ]
        exact = sum(_is_matmul(ins) for ins, _ in names)
        if exact:
            return exact
        # Small products become sums of products, in one fusion or several: count where they are.
        ends = ("dot_general", "conv_general_dilated", "pallas_call")
        return len({name for ins, name in names if name.endswith(ends)})

    def has_work(self, number: int) -> bool:
        """Whether anything of a region is left, other than constants for its loop's results."""
        return any(
            r == number and i.opcode not in _NO_WORK and not name.endswith("/broadcast_in_dim")
            for i, r, name in self._instructions
        )

    def any_again(self, number: int) -> bool:
        return any(
            r == number and "rematted_computation" in name for _, r, name in self._instructions
        )

    def repeated(self, number: int) -> _Instruction | None:
        """A product that XLA's own rematerialisation computes once more."""
        for ins, region, _ in self._instructions:
            if region == number and re.search(r"\.remat\d*(\.|$)", ins.name) and _is_matmul(ins):
                return ins
        return None

    def _read_order(self, instructions: list[_Instruction]) -> None:
        """In one computation: whose work is mixed, and which gradients are late."""
        work: dict[int, list[tuple[int, bool]]] = {}
        other: dict[int, list[tuple[int, bool]]] = {}
        for step, ins in enumerate(instructions):
            if ins.opcode in _NO_WORK or _MOVES.match(ins.opcode):
                continue
            heavy, owner, again = self._owner(ins)
            while owner is not None:
                (work if heavy else other).setdefault(owner, []).append((step, again))
                owner = self._regions[owner].parent
        work = {**other, **work}
        siblings: dict[int | None, list[int]] = {}
        for n in sorted(work, key=lambda n: work[n][0]):
            if self._regions[n].wrapped and self._regions[n].phase == "backward":
                siblings.setdefault(self._regions[n].parent, []).append(n)
        for a, b in (pair for group in siblings.values() for pair in itertools.pairwise(group)):
            begins = work[b][0][0]
            if after := [s for s, _ in work[a] if s > begins]:
                self.mixed[a] = instructions[after[0]], b
                self.mixed.setdefault(b, (instructions[begins], a))
            begins = next((s for s, again in work[b] if not again), None)
            late = [s for s, again in work[a] if begins is not None and s > begins and not again]
            if late:
                self.late[a] = [(instructions[s], b) for s in late]

    def _owner(self, ins: _Instruction) -> tuple[bool, int | None, bool]:
        """Whether an instruction is heavy, which region it works for, and whether it recomputes."""
        at, heavy = ins, ins.opcode == "while" or _is_matmul(ins)
        if ins.opcode in ("fusion", "call", "async-start"):
            for inner in (i for n in _called(ins) for i in self._module._computations.get(n, ())):
                if _is_matmul(inner):
                    heavy, at = True, inner if _op_name(inner) else at
        owners = self._owners.get(id(at), ())
        return heavy, owners[-1] if owners else None, "rematted_computation" in _op_name(at)


def _called(ins: _Instruction) -> list[str]:
    """The computations that an instruction calls."""
    names = (n for group in _CALLED.findall(ins.rest) for n in group.split(","))
    return [n.strip().lstrip("%") for n in names]


def _op_name(ins: _Instruction) -> str:
    found = _OP_NAME.search(ins.rest)
    return found[1] if found else ""


def _is_matmul(ins: _Instruction) -> bool:
    if ins.opcode == "custom-call":
        return _MATMUL_CALLS.search(ins.rest) is not None
    return ins.opcode in _MATMUL_OPS
