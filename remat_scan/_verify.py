"""`verify`: proof, on the compiled program, that isolation and recomputation survived the compiler."""

import dataclasses
import html
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ._isolation import LOOP_TAG
from ._memory import _donated, memory_report
from ._regions import Region, find_regions, flat_program, paired
from ._schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that the compiler, or the program, did to a layer.

    **Attributes:**

    - `check`: `"layers"`, `"wrapped"`, `"isolation"`, `"tag"`, `"checkpoint"`, `"recompute"`,
      `"overlap"`, `"late gradient"` or `"fits"`.
    - `layer`: the layer's name and number, and the pass.
    - `message`: what is wrong and what to do.
    - `instruction`: of the compiled program, if one is to blame.
    - `source`: the user's `file:line`.
    """

    check: str
    layer: str
    message: str
    instruction: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = "".join(f"\n      {w}" for w in (self.source, self.instruction) if w)
        return f"{self.check}: {self.layer}: {self.message}{where}"


@dataclasses.dataclass(frozen=True)
class LayerVerdict:
    """What became of one layer; `None` where a check does not apply.

    **Attributes:**

    - `number`, `name`, `source`: in the order of the forward pass; the line that calls it.
    - `isolation`: what the program asks for: `"loop"`, `"barrier"`, `"both"` or `"none"`.
    - `forward`, `backward`: `"loop"`: there, with its tag; `"untagged"`: there without its tag;
      `"gone"`; `"in order"`: isolated by a barrier, which compilers remove when they have obeyed
      it: the schedule keeps the layer apart from the others; `"mixed"`: it does not; `"unused"`:
      nobody needs the results of this pass, so it is not in the compiled program.
    - `recomputed`: how often the backward pass computes what it should compute once.
    - `late`: matrix products of this layer's backward pass after the next one's began.
    """

    number: int
    name: str
    source: str
    isolation: str
    forward: str | None
    backward: str | None
    recomputed: float | None
    late: int | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What `verify` found. `ok` is the answer; print it for a table."""

    target: str
    layers: tuple[LayerVerdict, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every layer is as it was asked for."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.target}: {len(self.layers)} layers, " + (
            "isolated and recomputed as asked"
            if self.ok
            else f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        )
        lines = [head]
        if self.layers:
            titles = ("layer", "isolation", "forward", "backward", "recomputed", "late", "source")
            rows = [
                (f"{r.number} {r.name}", r.isolation, _cell(r.forward), _cell(r.backward),
                 "–" if r.recomputed is None else f"{r.recomputed:g}×", _cell(r.late), r.source)
                for r in self.layers
            ]  # fmt: skip
            widths = [max(len(c) for c in column) for column in zip(titles, *rows, strict=True)]
            for row in (titles, *rows):
                cells = (f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
                lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  ✗ {p}" for p in self.problems]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The verdict as a JSON object."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)})


def verify(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "cpu",
    layers: int | None = None,
    timeout: float | int | None = None,
    **kwargs: Any,
) -> Verdict:
    """Proves that the layers of `fn` are still isolated and recomputed after compilation.

    ```python
    verdict = verify(jax.grad(loss), weights, x, target="h100:8", layers=35)
    assert verdict.ok, verdict
    ```

    The program is traced, each pass through each layer gets a name of its own (the only change), and
    it is compiled for `target` as [`remat_scan.memory_report`][] does. Then, for every layer, forward
    and backward: is its loop there, with the tag that keeps it? Is its forward pass recomputed in the
    backward pass, once? Does the schedule run two layers' backward passes in turns, or compute a
    weight gradient after the next layer's backward pass began? Compilers remove a barrier once they
    have ordered the program, so a barrier is judged by that order.

    **Arguments:**

    - `fn`, `args`, `kwargs`, `target`, `timeout`: as for [`remat_scan.memory_report`][]. `fn` should
      differentiate: without a backward pass there is little to prove.
    - `layers`: how many calls of wrapped layers there should be, if it is to be checked.

    **Returns:**

    A `Verdict`.

    **Raises:** what [`remat_scan.memory_report`][] raises.
    """
    program, arrays, avals, dynamic = flat_program(fn, args, kwargs)
    closed = jax.jit(program).trace(*avals).jaxpr
    marked, regions, unwrapped = find_regions(closed)
    report = memory_report(
        jex.jaxpr_as_fun(marked),
        *arrays,
        target=target,
        donate_argnums=_donated(fn, args, kwargs, (), dynamic),
        timeout=timeout,
    )
    problems = list(_program_problems(regions, unwrapped, layers))
    if not report.hlo:
        problems.append(Problem("fits", "the program", report.message or "it does not fit"))
        return Verdict(target, (), tuple(problems))
    reader = Schedule(report.hlo, regions)
    rows = [_judge(i, passes, reader, problems) for i, passes in enumerate(paired(regions))]
    return Verdict(target, tuple(rows), tuple(problems))


def _cell(value: Any) -> str:
    return "–" if value is None else str(value)


def _program_problems(
    regions: Sequence[Region], unwrapped: Sequence[tuple[str, str]], expected: int | None
) -> Iterator[Problem]:
    """What is wrong before the compiler has done anything."""
    for name, source in unwrapped:
        message = "is called without its wrapper here: nothing bounds this call's memory"
        yield Problem("wrapped", name, message, source=source)
    count = len([r for r in regions if r.wrapped and r.phase == "forward"])
    if count == 0:
        message = "no wrapped layer was found; wrap each with remat_scan.checkpointed_layer"
        yield Problem("layers", "the program", message)
    elif expected is not None and count != expected:
        message = f"{count} calls of wrapped layers were found, {expected} are expected"
        yield Problem("layers", "the program", message)


def _judge(
    number: int, passes: list[Region], reader: Schedule, problems: list[Problem]
) -> LayerVerdict:
    first = passes[0]
    loop, barrier = any(r.loop for r in passes), any(r.barrier for r in passes)
    asked = "both" if loop and barrier else "loop" if loop else "barrier" if barrier else "none"
    became: dict[str, str] = {}
    recomputed = late = None
    for region in passes:
        title = f"{number} {first.name}, {region.phase}"

        def blame(
            check: str, message: str, ins: Any = None,
            region: Region = region, title: str = title,
        ) -> None:  # fmt: skip
            source = (reader.line(ins) if ins is not None else "") or region.source
            problems.append(Problem(check, title, message, ins.name if ins else "", source))

        became[region.phase] = _isolation(region, reader, blame, asked)
        if region.phase == "backward":
            recomputed = _recomputation(region, first, reader, blame)
            late = len(reader.late.get(region.number, ()))
    if not first.wrapped:
        became = {}
    return LayerVerdict(
        number, first.name, first.source, asked,
        became.get("forward"), became.get("backward"), recomputed, late,
    )  # fmt: skip


def _isolation(region: Region, reader: Schedule, blame: Callable[..., None], asked: str) -> str:
    if not region.wrapped:
        return "none"
    if region.checkpoint == "outside" and region.phase == "backward":
        blame("checkpoint", "the checkpoint is outside of the loop; put it inside: "
              "isolated_scan(jax.checkpoint(layer)), or use checkpointed_layer")  # fmt: skip
    elif region.checkpoint == "missing" and region.phase == "backward":
        blame("checkpoint", "there is no checkpoint inside, so all intermediates are kept: use "
              "checkpointed_layer with a policy other than 'none'")  # fmt: skip
    if asked == "none":
        if region.phase == "forward" and region.matmuls + region.costly:
            blame("isolation", "nothing isolates this layer: it has no loop and no barrier")
        return "none"
    if asked != "barrier":
        tagged, untagged = reader.loops(region.number)
        if not tagged and untagged is None and not reader.has_work(region.number):
            return "unused"
        if not tagged and untagged is None:
            blame("isolation", "the loop is gone from the compiled program")
            return "gone"
        if not tagged:
            blame("tag", f"the loop has lost its tag {LOOP_TAG}", untagged)
            return "untagged"
    if asked != "loop" and region.phase == "backward" and (not region.barrier or region.bare):
        blame("isolation", "the barrier does not hold all cotangents of this layer: "
              f"{region.bare} pass by")  # fmt: skip
    mixed = reader.mixed.get(region.number)
    if mixed is not None:
        instruction, other = mixed
        blame("overlap", f"its work is mixed with {reader.title(other)}", instruction)
    for instruction, other in reader.late.get(region.number, ())[:1]:
        blame("late gradient", f"computed after {reader.title(other)} began", instruction)
    if asked == "barrier":
        return "mixed" if mixed is not None else "in order"
    return "loop"


def _recomputation(
    region: Region, first: Region, reader: Schedule, blame: Callable[..., None]
) -> float | None:
    if region.checkpoint != "inside":
        return None
    if region.again:
        found, wanted = reader.matmuls(region.number), region.again
        # Compilers merge products that share an operand: as many as in the forward pass are no loss.
        merged = 0
        if found and first.phase == "forward":
            merged = first.matmuls - reader.matmuls(first.number, again=False)
        elif found:
            merged = wanted - found
        ratio = 1.0 if 0 <= wanted - found <= merged else found / wanted
    elif region.costly_again:
        ratio = 1.0 if reader.any_again(region.number) else 0.0
    else:
        return None
    if ratio < 1:
        message = (
            "the recomputation was undone: the compiler merged it with the forward pass, and what "
            "it reads is kept (prevent_cse=False outside of a loop does this)"
        )
        blame("recompute", message)
    extra = reader.repeated(region.number)
    if ratio > 1 or extra is not None:
        blame("recompute", f"the forward pass is recomputed more than once ({ratio:g}×)", extra)
    return ratio
