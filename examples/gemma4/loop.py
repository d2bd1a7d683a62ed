"""The training loop: steps, checkpoints, a line in the log for each step, and a progress bar."""

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.sharding import NamedSharding

from .checkpoints import Checkpoints, write_whole
from .data import Source, global_batch
from .model import Gemma4
from .sharding import AnyMesh, replicated_matrices
from .step import Batch, Flops, State


@dataclass(frozen=True)
class Loop:
    """A run of training steps.

    **Arguments:**

    - `steps`: the last step's number, counted from 1.
    - `source`, `shape`, `rows`: batches of `shape` sequences × tokens, and how they lie on devices.
    - `flops`: of one step, on all devices.
    - `folder`: for `metrics.jsonl`; `None` writes nothing.
    - `checkpoints`, `save_every`: where, and after how many steps, the state is saved.
    """

    steps: int
    source: Source
    shape: tuple[int, int]
    rows: NamedSharding
    flops: Flops
    folder: Path | None
    checkpoints: Checkpoints | None
    save_every: int

    def run(self, step_fn: Any, state: State, start: int, position: int) -> int:
        """Goes on after step `start` with the source's sequences from `position` on.

        **Returns:** the exit code: 0, or 128 and the number of the signal that stopped it.

        **Raises:** `FloatingPointError` at a loss that is not finite, which is not saved.
        """
        if start >= self.steps:
            say(f"all {self.steps} steps are done; more need a larger --steps")
            return 0
        saved = start
        with (
            _log(self.folder, start) as log,
            _progress(start, self.steps) as show,
            _stop() as stop,
        ):
            batch = self._batch(position)
            show(None, "compiling")
            compiled = step_fn.lower(state, batch).compile()
            before = time.perf_counter()
            for step in range(start + 1, self.steps + 1):
                state, metrics = compiled(state, batch)
                position += self.shape[0]
                batch = self._batch(position)  # made while the devices work
                loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
                line = self._line(step, loss, grad_norm, time.perf_counter() - before)
                if not math.isfinite(loss):
                    kept = f"; the checkpoint of step {saved} is kept" if saved else ""
                    raise FloatingPointError(f"the loss is {loss} at step {step}{kept}")
                log(line)
                show(line, "")
                due = step % self.save_every == 0 or step == self.steps or stop.wanted
                if self.checkpoints and due:
                    notes = {"position": position, "source": self.source.fingerprint}
                    self.checkpoints.save(step, state._asdict(), notes)
                    saved = step
                before = time.perf_counter()  # what saving takes is not the step's
                if stop.wanted:
                    show(None, f"stopped after step {step}")
                    return 128 + stop.wanted
        return 0

    def _batch(self, position: int) -> Batch:
        return global_batch(self.source, position, self.shape, self.rows)

    def _line(self, step: int, loss: float, grad_norm: float, seconds: float) -> dict[str, Any]:
        per_device = seconds * self.rows.mesh.size
        return {
            "step": step,
            "loss": loss,
            "perplexity": math.exp(min(loss, 700)),
            "grad_norm": grad_norm,
            "seconds": seconds,
            "tokens_per_second_per_device": math.prod(self.shape) / per_device,
            "tflops_per_second_per_device": self.flops.total / per_device / 1e12,
            "learnable_share": self.flops.learnable / self.flops.total,
            "attention_share": self.flops.attention / self.flops.total,
        }


def introduce(model: Gemma4, mesh: AnyMesh, shape: tuple[int, int]) -> None:
    """Says what is trained, where, and which matrices every device has whole."""
    sizes = [x.size for x in jax.tree.leaves(model)]
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    where = f"{math.prod(mesh.shape.values())} × {jax.devices()[0].device_kind}"
    say(
        f"{sum(sizes) / 1e6:,.2f} M parameters on {where}{axes and ' as ' + axes}; "
        f"{shape[0]} × {shape[1]} tokens a step"
    )
    left = replicated_matrices(model, mesh)
    for line in left[:3]:
        say(f"  {line}")
    if len(left) > 3:
        say(f"  and {len(left) - 3} more matrices; all vectors are on every device")


def say(line: str) -> None:
    """Prints a line on standard error; of several processes, the first does."""
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _log(folder: Path | None, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes `metrics.jsonl`, a line a step. Steps that were lost are dropped from it first."""
    if folder is None or jax.process_index() != 0:
        yield lambda line: None
        return
    path = folder / "metrics.jsonl"
    kept = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off by a kill
                if json.loads(text)["step"] <= start:
                    kept.append(text + "\n")
    write_whole(path, "".join(kept))
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda line: print(json.dumps(line), file=file)


@contextlib.contextmanager
def _progress(start: int, steps: int) -> Iterator[Callable[[dict[str, Any] | None, str], None]]:
    """A bar on a terminal, some twenty lines elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, quiet=jax.process_index() != 0)
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    )
    every = max(1, (steps - start) // 20)

    def show(line: dict[str, Any] | None, note: str) -> None:
        if line is not None:
            note = (
                f"loss {line['loss']:.4f}  perplexity {line['perplexity']:,.2f}  "
                f"{line['tokens_per_second_per_device']:,.0f} tokens/s/device  "
                f"{line['tflops_per_second_per_device']:.3g} TFLOP/s/device "
                f"({line['learnable_share']:.0%} learnable, {line['attention_share']:.0%} attention)"
            )
            bar.update(task, advance=1, description=note)
            if console.is_terminal or (line["step"] % every and line["step"] != steps):
                return
            note = f"step {line['step']}/{steps}  {note}"
        bar.update(task, description=note)
        if not console.is_terminal or note.startswith("stopped"):
            console.print(note, highlight=False, soft_wrap=True)

    with bar:
        task = bar.add_task("", total=steps, completed=start)
        yield show


@dataclass
class _Stop:
    wanted: int = 0  # the signal that asks for it


@contextlib.contextmanager
def _stop() -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM end the run after the step in progress, with a checkpoint; the second ends
    it at once. With several processes the first does: the others could not know to stop with it."""
    stop = _Stop()
    signals = (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else ()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.wanted = number
        signal.signal(number, before[number])

    try:
        before: dict[int, Any] = {s: signal.signal(s, handle) for s in signals}
    except ValueError:  # not in the main thread
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
