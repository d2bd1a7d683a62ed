"""Reading a scheduled HLO program: which buffers are alive when memory is at its peak.

The text of a compiled program is in the order in which it runs, so the buffers alive at each step
follow from first and last uses. It is a reconstruction: the compiler packs buffers into the gaps of
others, and this does not, so a report shows how much of the compiler's own peak the list explains.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8,
    "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_HOST_SPACE = 5  # S(5) in a layout; 0 is the device's main memory, others are on the chip

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?([%\w.\-, ]+)\}?")
_TUPLE_INDEX = re.compile(r"\bindex=(\d+)")
_FORWARDING = {"bitcast", "opt-barrier", "optimization-barrier", "while", "tuple", "domain"}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Buffers alive at the peak that one of the user's lines made.

    **Attributes:**

    - `bytes`: their size on one device, together.
    - `count`: how many they are.
    - `shape`: type and shape of the largest, as in `bf16[8,8192,2048]`.
    - `source`: the user's `file:line`, or what the program calls it where no line is known.
    - `operation`: what makes it, for example `jvp(layer)/dot_general`.
    - `kind`: `"argument"` or `"temporary"`.
    """

    bytes: int
    count: int
    shape: str
    source: str
    operation: str
    kind: str


@dataclasses.dataclass(eq=False)
class _Block:
    """One allocation."""

    size: int
    shape: str
    instruction: "_Instruction | None"
    is_argument: bool = False


@dataclasses.dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str
    is_root: bool


class Module:
    """A scheduled HLO module, parsed from `compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        self._frames = _Frames(text)
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = ""
        self._donated = dict(_donations(text))
        current: list[_Instruction] | None = None
        for line in text.splitlines():
            if current is None:
                if line.endswith("{") and "->" in line:
                    head = line.removeprefix("ENTRY ").strip().lstrip("%")
                    name = re.split(r"[\s(]", head, maxsplit=1)[0]
                    current = self._computations[name] = []
                    if line.startswith("ENTRY "):
                        self._entry = name
            elif line.startswith("}"):
                current = None
            elif (instruction := _parse(line)) is not None:
                current.append(instruction)

    def at_peak(self) -> list[Buffer]:
        """The buffers alive at the peak, largest first, grouped by the line that made them."""
        if not self._entry:
            return []
        _, blocks = self._peak(self._entry)
        groups: dict[tuple[str, str, str], list[_Block]] = {}
        for block in blocks:
            kind = "argument" if block.is_argument else "temporary"
            source, operation = self._origin(block)
            groups.setdefault((source, operation, kind), []).append(block)
        buffers = [
            Buffer(sum(b.size for b in bs), len(bs), max(bs, key=lambda b: b.size).shape, *key)
            for key, bs in groups.items()
        ]
        return sorted(buffers, key=lambda b: -b.bytes)

    def _origin(self, block: _Block) -> tuple[str, str]:
        if (made_by := block.instruction) is None:
            return "", ""
        op_name = re.search(r'op_name="([^"]*)"', made_by.rest)
        name = op_name[1] if op_name else ""
        if block.is_argument:
            return name or made_by.name, "argument"
        parts = [
            p for p in name.split("/") if p not in ("while", "body", "closed_call", "eval_jaxpr")
        ]
        operation = "/".join(parts[1:]) if len(parts) > 1 else made_by.opcode
        return self._frames.line(made_by.rest) or made_by.name, operation

    def _peak(self, computation: str) -> tuple[int, list[_Block]]:
        """Bytes at the peak and the blocks alive then; a computation's own operands don't count,
        except the entry's."""
        instructions = self._computations[computation]
        is_entry = computation == self._entry
        values, defined, inner = self._allocate(instructions, is_entry)
        root = next((i for i in instructions if i.is_root), instructions[-1])
        same = self._shared_with_operands(instructions, root, values, is_entry)
        last: dict[_Block, int] = {}
        for step, instruction in enumerate(instructions):
            for operand in instruction.operands:
                for block in _blocks(values.get(operand)):
                    last[same.get(block, block)] = step
        for block in _blocks(values[root.name]):
            last[same.get(block, block)] = len(instructions)
        starts: dict[int, list[_Block]] = {}
        for block, step in defined.items():
            if block not in same:
                starts.setdefault(step, []).append(block)
                last.setdefault(block, step)
        for step, instruction in enumerate(instructions):
            operands = [
                same.get(b, b) for o in instruction.operands for b in _blocks(values.get(o))
            ]
            write_over(instruction, step, starts.get(step, ()), operands, last)
        ends: dict[int, list[_Block]] = {}
        for block, step in last.items():
            ends.setdefault(len(instructions) if block.is_argument else step, []).append(block)
        alive: dict[_Block, None] = {}
        now = best = 0
        at_best: list[_Block] = []
        for step in range(len(instructions)):
            for block in starts.get(step, ()):
                alive[block] = None
                now += block.size
            inner_bytes, inner_blocks = inner.get(step, (0, []))
            if now + inner_bytes > best:
                best, at_best = now + inner_bytes, [*alive, *inner_blocks]
            for block in ends.get(step, ()):
                if block in alive:
                    del alive[block]
                    now -= block.size
        return best, at_best

    def _allocate(
        self, instructions: list[_Instruction], is_entry: bool
    ) -> tuple[dict[str, Any], dict[_Block, int], dict[int, tuple[int, list[_Block]]]]:
        """What each instruction's value is made of, when each block begins, and what runs inside."""
        values: dict[str, Any] = {}
        defined: dict[_Block, int] = {}
        inner: dict[int, tuple[int, list[_Block]]] = {}
        for step, ins in enumerate(instructions):
            operands = [values.get(o) for o in ins.operands]
            if ins.opcode == "parameter":
                value = _new(ins, argument=True)
                if is_entry:
                    defined.update(dict.fromkeys(_blocks(value), 0))
            elif ins.opcode == "get-tuple-element":
                index = int(_TUPLE_INDEX.search(ins.rest)[1])  # pyright: ignore
                value = operands[0][index] if isinstance(operands[0], list) else operands[0]
            elif ins.opcode == "tuple":
                value = operands
            elif ins.opcode in _FORWARDING:
                value = operands[0] if len(operands) == 1 else operands
            elif ins.opcode.endswith(("-done", "-update")) and operands:
                value = _result_of_start(operands[0])
            elif ins.opcode.endswith("-start"):
                value = _Started(_new_result(ins))
            elif (target := self._in_place(ins)) is not None and target < len(operands):
                value = operands[target]
            elif ins.opcode == "constant":
                value = None
            else:
                value = _new(ins)
            values[ins.name] = value
            for block in _blocks(value):
                defined.setdefault(block, step)
            if ins.opcode in ("while", "call", "conditional"):
                called = _CALLED.findall(ins.rest)
                names = [n.strip().lstrip("%") for c in called for n in c.split(",")]
                peaks = [self._peak(n) for n in names if n in self._computations]
                inner[step] = max(peaks, key=lambda p: p[0], default=(0, []))
        if not is_entry:  # operands belong to the caller
            for ins in instructions:
                if ins.opcode == "parameter":
                    for block in _blocks(values[ins.name]):
                        defined.pop(block, None)
        return values, defined, inner

    def _shared_with_operands(
        self,
        instructions: list[_Instruction],
        root: _Instruction,
        values: dict[str, Any],
        is_entry: bool,
    ) -> dict[_Block, _Block]:
        """Results that live in an operand's block: a loop's carry, and donated arguments."""
        parameters = [i for i in instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: int(i.operands[0]) if i.operands else 0)
        results = values[root.name]
        results = results if isinstance(results, list) else [results]
        pairs: list[tuple[Any, Any]] = []
        if is_entry:
            by_number = {int(p.operands[0]): values[p.name] for p in parameters}
            pairs = [
                (results[o], by_number[p]) for o, p in self._donated.items() if o < len(results)
            ]
        elif len(parameters) == 1 and isinstance(values[parameters[0].name], list):
            pairs = list(zip(results, values[parameters[0].name], strict=False))
        return {
            r: p
            for result, parameter in pairs
            for r, p in zip(_blocks(result), _blocks(parameter), strict=False)
            if r is not p and not r.is_argument
        }

    def _in_place(self, ins: _Instruction) -> int | None:
        """Which operand's block a dynamic-update-slice, alone or as a fusion's root, writes to."""
        if ins.opcode == "dynamic-update-slice":
            return 0
        if ins.opcode != "fusion" or not (called := _CALLED.search(ins.rest)):
            return None
        fused = {i.name: i for i in self._computations.get(called[1].strip().lstrip("%"), ())}
        at = next((i for i in fused.values() if i.is_root), None)
        while at is not None and at.opcode in ("bitcast", "copy") and at.operands:
            at = fused.get(at.operands[0])
        if at is None or at.opcode != "dynamic-update-slice":
            return None
        while at is not None and at.opcode in ("bitcast", "dynamic-update-slice"):
            at = fused.get(at.operands[0])
        return int(at.operands[0]) if at is not None and at.opcode == "parameter" else None


class _Frames:
    """Where an instruction comes from: the innermost of the user's own lines."""

    def __init__(self, text: str) -> None:
        self._files = dict(re.findall(r'^(\d+) "([^"]+)"$', _table(text, "FileNames"), re.M))
        self._locations = {
            m[0]: (m[1], m[2])
            for m in re.findall(
                r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _table(text, "FileLocations"), re.M
            )
        }
        self._parents = {
            m[0]: (m[1], m[2])
            for m in re.findall(
                r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
                _table(text, "StackFrames"),
                re.M,
            )
        }

    def line(self, rest: str) -> str:
        if direct := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', rest):
            return f"{direct[1]}:{direct[2]}" if direct[2] else direct[1]
        at = re.search(r"stack_frame_id=(\d+)", rest)
        frame = at[1] if at else ""
        first, seen = "", set()
        while frame in self._parents and frame not in seen:
            seen.add(frame)
            location, parent = self._parents[frame]
            file_id, number = self._locations.get(location, ("", ""))
            file = self._files.get(file_id, "")
            here = f"{file}:{number}"
            first = first or here
            if file and not re.search(r"(^|/)(remat_scan/_\w+\.py$|site-packages/)", file):
                return here
            frame = parent
        return first


def write_over(
    ins: _Instruction,
    step: int,
    made: Iterable[_Block],
    read: Iterable[_Block],
    last: dict[_Block, int],
) -> None:
    """An elementwise fusion writes over an operand of the same size that nobody reads later: `last`,
    the steps at which blocks are read for the last time, then ends one step earlier for it."""
    if ins.opcode != "fusion" or "kind=kLoop" not in ins.rest:
        return
    dying = [b for b in dict.fromkeys(read) if last.get(b) == step and not b.is_argument]
    for block in made:
        over = next((b for b in dying if b.size == block.size), None)
        if over is not None:
            dying.remove(over)
            last[over] = step - 1


class _Started:
    """The value of an asynchronous operation's first half."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _result_of_start(value: Any) -> Any:
    return value.result if isinstance(value, _Started) else value


def _blocks(value: Any) -> Iterator[_Block]:
    if isinstance(value, _Block):
        yield value
    elif isinstance(value, _Started):
        yield from _blocks(value.result)
    elif isinstance(value, list):
        for v in value:
            yield from _blocks(v)


def _new(ins: _Instruction, argument: bool = False) -> Any:
    return _allocate_shape(_nested(ins.shape), ins, argument)


def _new_result(ins: _Instruction) -> Any:
    """Of `(operands, results, context...)` only the results are new."""
    shape = _nested(ins.shape)
    if isinstance(shape, list) and len(shape) > 1 and ins.opcode != "all-reduce-start":
        shape = shape[0] if ins.opcode == "copy-start" else shape[1]
    return _allocate_shape(shape, ins, False)


def _allocate_shape(shape: Any, ins: _Instruction, argument: bool) -> Any:
    if isinstance(shape, list):
        return [_allocate_shape(s, ins, argument) for s in shape]
    size, space = array_bytes(shape)
    return _Block(size if space == 0 else 0, shape.split("{")[0], ins, argument)


def array_bytes(shape: str) -> tuple[int, int]:
    """Bytes of an array as HLO prints it, with the padding of its tiles, and its memory space."""
    match = _ARRAY.match(shape)
    if match is None:
        return 0, 0
    dtype, dims_text, layout = match[1], match[2], match[3] or ""
    dims = [int(re.sub(r"\D", "", d)) for d in dims_text.split(",") if d.strip()]
    bits = _BITS.get(dtype, 8)  # the many eight-bit floats
    order, _, tiling = layout.partition(":")
    space = re.search(r"S\((\d+)\)", tiling)
    if dims and (tile := re.search(r"T\(([\d,]+)\)", tiling)):
        major_to_minor = [dims[int(d)] for d in reversed(order.split(","))] if order else dims
        sizes = [int(t) for t in tile[1].split(",")]
        lead, tail = major_to_minor[: -len(sizes)], major_to_minor[-len(sizes) :]
        padded = [math.ceil(d / t) * t for d, t in zip(tail, sizes[-len(tail) :], strict=True)]
        dims = lead + padded
    return math.ceil(math.prod(dims) * bits / 8), int(space[1]) if space else 0


def _nested(shape: str) -> Any:
    """`"(f32[2]{0}, (s32[]))"` as nested lists of array shapes."""
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        return shape
    parts, depth, start = [], 0, 1
    for at, c in enumerate(shape):
        depth += c in "([{"
        depth -= c in ")]}"
        if (c == "," and depth == 1) or depth == 0:
            if shape[start:at].strip():
                parts.append(_nested(shape[start:at]))
            start = at + 1
            if depth == 0:
                break
    return parts


def _parse(line: str) -> _Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    text = match[3]
    end = _balanced(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return None
    close = _balanced(text, opcode.end() - 1)
    inside, rest = text[opcode.end() : close - 1], text[close:]
    if opcode[1] == "parameter":
        operands = [inside]
    else:
        operands = re.findall(r"%([\w.\-]+)", inside)
    return _Instruction(match[2], text[:end], opcode[1], operands, rest, bool(match[1]))


def _balanced(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += text[at] in "([{"
        depth -= text[at] in ")]}"
        if depth == 0:
            return at + 1
    return len(text)


def _table(text: str, title: str) -> str:
    _, found, rest = text.partition(f"\n{title}\n")
    return rest.split("\n\n", 1)[0] if found else ""


def _donations(text: str) -> Iterator[tuple[int, int]]:
    """Pairs (result, argument) of `input_output_alias={ {0}: (3, {}, may-alias), ... }`."""
    head = text.split("\n", 1)[0]
    for result, argument in re.findall(r"\{(\d*)\}: \((\d+), \{\}", head):
        yield int(result or 0), int(argument)


def opcode_counts(text: str) -> Counter[str]:
    """How often each operation stands in a program, in all its computations."""
    module = Module(text)
    return Counter(i.opcode for c in module._computations.values() for i in c)
