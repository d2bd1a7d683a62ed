"""What a compiled program's collectives run beside, read from its schedule."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from remat_scan._hlo import _CALLED, Module, _Instruction, _nested, array_bytes
from remat_scan._schedule import _is_matmul

_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast|"
    r"ragged-all-to-all)(-start)?$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OFFLOADED = re.compile(r"called_computations=\{([^}]*)\}")  # to another core of a TPU
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
    found: dict[str, int] = dict.fromkeys(names, 0)
    for times, in_loop, collective in reader.collectives(reader.module._entry, 1, False):
        where = "loop" if in_loop else "entry"
        found[f"{where}_bytes"] += times * collective.bytes
        found[f"{where}_beside_bytes"] += times * collective.bytes * collective.beside
    return {**found, "estimated_cycles": reader.cycles(reader.module._entry) or None}


class _Reader:
    def __init__(self, text: str) -> None:
        self.module = Module(text)
        every = self.module._computations.values()
        self._shapes = {i.name: _nested(i.shape) for c in every for i in c}

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
                    repeated = times * _trips(ins) if loop else times
                    yield from self.collectives(called, repeated, in_loop or loop)

    def cycles(self, computation: str) -> int:
        total = 0
        for ins in self._instructions(computation):
            if ins.opcode in ("while", "call", "conditional"):
                inside = [self.cycles(called) for called in self._called(ins)]
                total += _trips(ins) * max(inside, default=0)
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

    def _called(self, ins: _Instruction) -> list[str]:
        found = _CALLED.findall(ins.rest) + _OFFLOADED.findall(ins.rest)
        names = [n.strip().lstrip("%") for c in found for n in c.split(",")]
        return [n for n in names if n in self.module._computations]

    def _instructions(self, computation: str) -> list[_Instruction]:
        return self.module._computations[computation]


def _trips(ins: _Instruction) -> int:
    known = _TRIPS.search(ins.rest)
    return int(known[1]) if known else 1


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
