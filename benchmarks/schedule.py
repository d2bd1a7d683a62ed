"""`python -m benchmarks.schedule`: what is alive at each step of a compiled training step.

Writes `results/schedule.json`, which the plots and the sample report of the documentation are drawn
from. The order of the steps is the compiler's; how long a step takes is not known, so the axis is the
position in the schedule, with the bodies of loops unrolled into it.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax: plugins must not look for hardware

from remat_scan import MissingPluginError, memory_report
from remat_scan._hlo import (
    _CALLED,
    Module,
    _Block,
    _blocks,
    _Instruction,
    opcode_counts,
    write_over,
)
from remat_scan._targets import check_installed, parse_target, versions

from .results import made_by, save
from .stack import Stack

TARGET = "h100:8"
WAYS = ("no remat", "jax.checkpoint", "loop", "barrier", "loop, input on host")
STACK = Stack(8)
POINTS = 400  # of a curve
_NO_WORK = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "call")
KINDS = ("arguments", "layer inputs", "wide activations", "weights and gradients")


class _Timeline:
    """The life of each buffer, in steps of the schedule; loops that run once are walked through."""

    def __init__(self, text: str) -> None:
        self._module = Module(text)
        self.steps = 0
        self.begin: dict[_Block, int] = {}
        self.end: dict[_Block, int] = {}
        self._reads: list[tuple[_Instruction, int, list[_Block], list[_Block]]] = []
        entry = self._module._entry
        values = self._walk(entry, None)
        instructions = self._module._computations[entry]
        root = next((i for i in instructions if i.is_root), instructions[-1])
        for block in _blocks(values[root.name]):
            self.end[block] = self.steps
        for block in self.begin:
            if block.is_argument:
                self.end[block] = self.steps
        for instruction, step, made, read in self._reads:
            write_over(instruction, step, made, read, self.end)

    def _walk(self, computation: str, arguments: list[Any] | None) -> dict[str, Any]:
        """Runs through one computation; `arguments` are the values that its caller hands in."""
        module = self._module
        instructions = module._computations[computation]
        values, defined, _ = module._allocate(instructions, arguments is None)
        root = next((i for i in instructions if i.is_root), instructions[-1])
        same = module._shared_with_operands(instructions, root, values, arguments is None)
        if arguments is not None:
            parameters = [i for i in instructions if i.opcode == "parameter"]
            parameters.sort(key=lambda i: int(i.operands[0]) if i.operands else 0)
            for parameter, given in zip(parameters, arguments, strict=False):
                inner = list(_blocks(values[parameter.name]))
                same |= dict(zip(inner, _blocks(given), strict=False))
        starts: dict[int, list[_Block]] = {}
        for block, step in defined.items():
            starts.setdefault(step, []).append(block)

        def real(block: _Block) -> _Block:
            while block in same and same[block] is not block:
                block = same[block]
            return block

        for step, instruction in enumerate(instructions):
            if instruction.opcode in ("while", "call", "conditional"):
                self._enter(instruction, values, real)
            for block in starts.get(step, ()):
                if real(block) is block:
                    self.begin.setdefault(block, self.steps)
                    self.end.setdefault(block, self.steps)
            for operand in instruction.operands:
                for block in _blocks(values.get(operand)):
                    self.end[real(block)] = self.steps
            made = [real(b) for b in starts.get(step, ()) if b is real(b)]
            read = [real(b) for o in instruction.operands for b in _blocks(values.get(o))]
            self._reads.append((instruction, self.steps, made, read))
            self.steps += instruction.opcode not in _NO_WORK
        return values

    def _enter(self, instruction: _Instruction, values: dict[str, Any], real: Any) -> None:
        for name in _called(instruction):
            if name in self._module._computations:
                operands = [_mapped(values.get(o), real) for o in instruction.operands]
                self._walk(name, operands)


def _called(instruction: _Instruction) -> list[str]:
    found = _CALLED.findall(instruction.rest)
    return [n.strip().lstrip("%") for names in found for n in names.split(",")]


def _mapped(value: Any, real: Any) -> Any:
    if isinstance(value, _Block):
        return real(value)
    return [_mapped(v, real) for v in value] if isinstance(value, list) else value


def _kind(block: _Block, stack: Stack) -> str:
    if block.is_argument:
        return "arguments"
    dims = block.shape.partition("[")[2].rstrip("]").split(",")  # GPU programs flatten some of them
    size = math.prod(int(d) for d in dims if d)
    tokens = stack.batch * stack.length
    if size == tokens * stack.hidden:
        return "wide activations"
    if size == tokens * stack.width:
        return "layer inputs"
    return "weights and gradients"


def timeline(text: str, stack: Stack) -> dict[str, Any]:
    """Bytes alive at each step by kind, and the lives of the wide activations."""
    line = _Timeline(text)
    deltas: dict[str, dict[int, int]] = {k: {} for k in KINDS}
    bars = []
    for block, begin in line.begin.items():
        if block.size == 0:
            continue
        kind, end = _kind(block, stack), line.end[block]
        deltas[kind][begin] = deltas[kind].get(begin, 0) + block.size
        deltas[kind][end + 1] = deltas[kind].get(end + 1, 0) - block.size
        if kind == "wide activations":
            bars.append([begin, end, block.size])
    alive: dict[str, list[int]] = {}
    for kind, changes in deltas.items():
        now, series = 0, []
        for step in range(line.steps):
            now += changes.get(step, 0)
            series.append(now)
        alive[kind] = series
    totals = [sum(at) for at in zip(*alive.values(), strict=True)]
    return {
        "steps": line.steps,
        "peak_found_bytes": max(totals),
        "alive_bytes": {kind: _thinned(series, totals) for kind, series in alive.items()},
        "wide_activations": sorted(bars),
    }


def _reduce_scatters(text: str) -> int:
    counts = opcode_counts(text)
    return counts["reduce-scatter"] + counts["reduce-scatter-start"]


def _thinned(series: list[int], totals: list[int]) -> list[int]:
    """At most `POINTS` of the series: in each stretch the step at which most is alive in all."""
    stretch = max(1, -(-len(series) // POINTS))
    return [
        series[max(range(at, min(at + stretch, len(series))), key=totals.__getitem__)]
        for at in range(0, len(series), stretch)
    ]


def main() -> int:
    """Compiles every way and writes the file."""
    where = parse_target(TARGET)
    try:
        check_installed(where)
    except MissingPluginError as missing:
        print(missing, file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    root = f"{Path(__file__).parent.parent}/"
    for way in WAYS:
        step, *args = STACK.program(way)
        report = memory_report(step, *args, target=TARGET)
        found = timeline(report.hlo, STACK)
        rows.append(
            {
                "case": "schedule",
                "target": TARGET,
                "configuration": way,
                "layers": STACK.layers,
                "peak_bytes": report.peak,
                "host_bytes": report.host,
                "reduce_scatters": _reduce_scatters(report.hlo),
                **found,
                "report": json.loads(report.to_json().replace(root, "")),
                **versions(where),
                **made_by(),
            }
        )
        peak, explained = report.peak or 0, found["peak_found_bytes"]
        print(f"{way:<24}{peak / 2**30:8.2f} GiB, found {explained / 2**30:.2f}", flush=True)
    save("schedule", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
