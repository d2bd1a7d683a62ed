"""What a compiled program's collectives run beside, read from its schedule."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from remat_scan._hlo import _CALLED, _TUPLE_INDEX, Module, _Instruction, _nested, array_bytes
from remat_scan._schedule import _is_matmul

_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast|"
    r"ragged-all-to-all)(-start)?$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OFFLOADED = re.compile(r"called_computations=\{([^}]*)\}")  # to another core of a TPU
_FROM_HOST = re.compile(r"\((?:(?!S\(5\)).)*?\}, \S*S\(5\)")  # (result, operand, …)
_SYNCHRONOUS = re.compile(r'"is_sync":true')


@dataclasses.dataclass
class _Running:
    """A collective between its start and its end."""

    bytes: int
    beside: bool = False  # a matrix product has run since


def collectives(text: str) -> dict[str, Any]:
    """Bytes of one device's collectives in one run of a scheduled program, and XLA's own estimate.

    A collective's bytes are those of its operands or of its results, whichever are more. It runs
    *beside compute* if there is a matrix product, or a loop or call with one, between its start and its
    end; what the compiler says it runs synchronously never does. Bodies of loops count as often as
    they run, a loop whose count is not known once.

    **Arguments:**

    - `text`: the scheduled program, `MemoryReport.hlo`.

    **Returns:**

    - `entry_bytes`, `loop_bytes`: of collectives in the program itself and in bodies of loops.
    - `entry_beside_bytes`, `loop_beside_bytes`: those of them that run beside compute.
    - `estimated_cycles`: on TPU the sum of XLA's estimates along the schedule; else `None`. They are
      what the scheduler weighs instructions by, each as if it ran alone: waiting for a collective that
      nothing hides is not in it, nor is contention for memory. Compare programs, not machines.
    """
    reader = _Reader(text)
    names = ("entry_bytes", "entry_beside_bytes", "loop_bytes", "loop_beside_bytes")
    found: dict[str, Any] = dict.fromkeys(names, 0)
    for times, in_loop, collective in reader.collectives(reader.module._entry, 1, False):
        where = "loop" if in_loop else "entry"
        found[f"{where}_bytes"] += times * collective.bytes
        found[f"{where}_beside_bytes"] += times * collective.bytes * collective.beside
    return {**found, "estimated_cycles": reader.cycles(reader.module._entry) or None}


def copies_from_host(text: str) -> dict[str, int]:
    """Bytes that one device copies from the host's memory, and how many of them beside compute.

    Counted as by `collectives`: beside compute if there is a matrix product between start and end.

    **Arguments:**

    - `text`: the scheduled program, `MemoryReport.hlo`.
    """
    reader = _Copies(text)
    found = {"from_host_bytes": 0, "from_host_beside_bytes": 0}
    for times, _, copy in reader.collectives(reader.module._entry, 1, False):
        found["from_host_bytes"] += times * copy.bytes
        found["from_host_beside_bytes"] += times * copy.bytes * copy.beside
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self.module = Module(text)
        every = self.module._computations.values()
        self._shapes = {i.name: _nested(i.shape) for c in every for i in c}
        self._constants = {name: int(value) for name, value in _CONSTANT.findall(text)}

    def collectives(
        self, computation: str, times: int, in_loop: bool
    ) -> Iterator[tuple[int, bool, _Running]]:
        """How often each collective runs, whether in a loop's body, and beside what."""
        running: dict[str, _Running] = {}
        for ins in self._instructions(computation):
            if (started := self._started(ins)) is not None:
                if ins.opcode.endswith("-start"):
                    running[ins.name] = started
                else:
                    yield times, in_loop, started
            elif ins.opcode.endswith("-update") and ins.operands[0] in running:
                # Its operands come with the update: before that it could not run.
                running[ins.name] = dataclasses.replace(running.pop(ins.operands[0]), beside=False)
            elif ins.opcode.endswith("-done") and ins.operands[0] in running:
                ended = running.pop(ins.operands[0])
                if _SYNCHRONOUS.search(ins.rest):
                    ended.beside = False
                yield times, in_loop, ended
            elif self._computes(ins):
                for collective in running.values():
                    collective.beside = True
            if ins.opcode in ("while", "call", "conditional"):
                loop = ins.opcode == "while"
                for called in self._called(ins):
                    repeated = times * self._trips(ins, computation) if loop else times
                    yield from self.collectives(called, repeated, in_loop or loop)

    def cycles(self, computation: str) -> int:
        total = 0
        for ins in self._instructions(computation):
            if ins.opcode in ("while", "call", "conditional"):
                inside = [self.cycles(called) for called in self._called(ins)]
                total += self._trips(ins, computation) * max(inside, default=0)
            elif found := _CYCLES.search(ins.rest):
                total += int(found[1])
        return total

    def _started(self, ins: _Instruction) -> _Running | None:
        """The collective that an instruction starts, or is."""
        if _COLLECTIVE.match(ins.opcode):
            return _Running(self._moved(ins))
        if ins.opcode in ("async-start", "custom-call-start", "fusion"):
            inside = [
                self._moved(i)
                for called in self._called(ins)
                for i in self._instructions(called)
                if _COLLECTIVE.match(i.opcode)
            ]
            return _Running(sum(inside), self._computes(ins)) if inside else None
        return None

    def _moved(self, ins: _Instruction) -> int:
        operands = [self._shapes[o] for o in ins.operands if o in self._shapes]
        return max(_bytes(operands), _bytes(_result(ins)))

    def _computes(self, ins: _Instruction) -> bool:
        if _is_matmul(ins):
            return True
        if ins.opcode not in ("fusion", "call", "while", "conditional", "async-start"):
            return False
        return any(self._computes(i) for c in self._called(ins) for i in self._instructions(c))

    def _trips(self, ins: _Instruction, computation: str) -> int:
        """How often a loop's body runs: what the compiler says, or `i < bound` with `i` going from one
        constant in steps of another; 1 where neither is there."""
        if known := _TRIPS.search(ins.rest):
            return int(known[1])
        named = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", ins.rest))
        if ins.opcode != "while" or not {"condition", "body"} <= set(named):
            return 1
        test = self._root(named["condition"])
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return 1
        at = self._element(test.operands[0], named["condition"])
        results, initial = self._root(named["body"]), self._source(ins.operands[0], computation)
        if at is None or results.opcode != "tuple" or initial is None or initial.opcode != "tuple":
            return 1
        step = self._source(results.operands[at], named["body"])
        if step is None or step.opcode != "add":
            return 1

        def value(name: str, where: str) -> int | None:
            element = self._element(name, where)  # what the loop leaves as it came
            name, where = (
                (name, where) if element is None else (initial.operands[element], computation)
            )
            found = self._source(name, where)
            return None if found is None else self._constants.get(found.name)

        start = value(initial.operands[at], computation)
        bound = value(test.operands[1], named["condition"])
        steps = [value(o, named["body"]) for o in step.operands
                 if self._element(o, named["body"]) != at]  # fmt: skip
        if start is None or bound is None or len(steps) != 1 or not steps[0]:
            return 1
        return max(0, -((start - bound) // steps[0]))

    def _root(self, computation: str) -> _Instruction:
        instructions = self._instructions(computation)
        return next((i for i in instructions if i.is_root), instructions[-1])

    def _source(self, name: str, computation: str) -> _Instruction | None:
        """The instruction of that name, or what it is a copy of."""
        found = next((i for i in self._instructions(computation) if i.name == name), None)
        while found is not None and found.opcode in ("copy", "bitcast"):
            name = found.operands[0]
            found = next((i for i in self._instructions(computation) if i.name == name), None)
        return found

    def _element(self, name: str, computation: str) -> int | None:
        """Which element of the loop's state a value is."""
        found = self._source(name, computation)
        if found is None or found.opcode != "get-tuple-element":
            return None
        return int(_TUPLE_INDEX.search(found.rest)[1])  # pyright: ignore[reportOptionalSubscript]

    def _called(self, ins: _Instruction) -> list[str]:
        found = _CALLED.findall(ins.rest) + _OFFLOADED.findall(ins.rest)
        names = [n.strip().lstrip("%") for c in found for n in c.split(",")]
        return [n for n in names if n in self.module._computations]

    def _instructions(self, computation: str) -> list[_Instruction]:
        return self.module._computations[computation]


class _Copies(_Reader):
    """Reads copies from the host in place of collectives."""

    def _started(self, ins: _Instruction) -> _Running | None:
        if ins.opcode != "copy-start" or not _FROM_HOST.match(ins.shape):
            return None
        return _Running(_bytes(_nested(ins.shape)[0]))


def _result(ins: _Instruction) -> Any:
    """The shape of what an instruction, or the operation that it starts, results in."""
    shape = _nested(ins.shape)
    if ins.opcode.endswith("-start") and ins.opcode != "all-reduce-start":
        return shape[1]  # after the operands, before what else the compiler keeps
    return shape


def _bytes(shape: Any) -> int:
    if isinstance(shape, list):
        return sum(_bytes(s) for s in shape)
    return array_bytes(shape)[0]
