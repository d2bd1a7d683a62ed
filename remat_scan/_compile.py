"""Compiling an exported program for a target: here, or in a child process that may die.

libtpu and the CUDA compiler can end the whole process on a bug of theirs, so what is not for the CPU
is compiled by `python -m remat_scan._compile JOB RESULT` with its own environment.
"""

import contextlib
import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ._targets import Target, compile_only_devices, environment


class CompilerError(RuntimeError):
    """The target's compiler refused the program, or died of it. The message holds its own line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile, in a form that another process can read.

    **Attributes:**

    - `exported`: a `jax.export.Exported` of one flat list of arrays, or its serialisation.
    - `shardings`: for each array `(mesh axes as (name, size, type) triples, PartitionSpec, memory
      kind)`, or `None`.
    - `donated`: the positions of donated arrays.
    """

    exported: Any
    shardings: tuple[Any, ...]
    donated: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said. `memory` is `None` for a program that does not fit."""

    memory: dict[str, int] | None
    text: str
    seconds: float
    out_of_memory: str = ""


def compile_here(job: Job, target: Target) -> Compiled:
    """Compiles in this process."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding

    count = job.exported.nr_devices
    devices = compile_only_devices(target, count)

    def sharding(described: Any) -> Any:
        if described is None:
            return None
        axes, spec, kind = described
        import numpy as np

        mesh = Mesh(
            np.array(devices).reshape([size for _, size, _ in axes]),
            tuple(name for name, _, _ in axes),
            axis_types=tuple(AxisType[type_] for *_, type_ in axes),
        )
        return NamedSharding(mesh, spec, memory_kind=kind)

    here = [sharding(s) for s in job.shardings]
    if count == 1:
        single = jax.sharding.SingleDeviceSharding(devices[0])
        here = [s or single for s in here]
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s)
        for aval, s in zip(job.exported.in_avals, here, strict=True)
    ]
    platform = {"tpu": "tpu", "cuda": "cuda", "cpu": "cpu"}[target.platform]
    lowered = (
        jax.jit(job.exported.call, donate_argnums=job.donated)
        .trace(*args)
        .lower(lowering_platforms=(platform,))
    )
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
            raise
        return Compiled(None, "", time.perf_counter() - start, message)
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    fields = [f for f in dir(stats) if f.endswith("_in_bytes")]
    memory = {f.removesuffix("_in_bytes"): int(getattr(stats, f)) for f in fields}
    return Compiled(memory, compiled.as_text() or "", seconds)


def compile_in_child(job: Job, target: Target, timeout: float | None, progress: bool) -> Compiled:
    """Compiles in a process of its own, which a time-out or Ctrl-C ends.

    **Raises:** `CompilerError` if the compiler fails or dies; `TimeoutError`.
    """
    try:
        job = dataclasses.replace(job, exported=bytes(job.exported.serialize()))
    except ImportError as error:
        raise ImportError(
            "Sending a program to another process needs flatbuffers: pip install flatbuffers"
        ) from error
    with tempfile.TemporaryDirectory(prefix="remat_scan_") as folder:
        job_file, result_file, log_file = (Path(folder, n) for n in ("job", "result", "log"))
        job_file.write_bytes(pickle.dumps((job, target)))
        package = str(Path(__file__).parent.parent)
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | environment(target) | {"PYTHONPATH": path}
        with open(log_file, "wb") as log:
            child = subprocess.Popen(
                [*_command(), str(job_file), str(result_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,  # Ctrl-C reaches it through us, and so do its children
            )
            with _ended(child):
                _wait(child, target, timeout, progress)
        if child.returncode == 0 and result_file.exists():
            outcome = pickle.loads(result_file.read_bytes())
            if isinstance(outcome, Compiled):
                return outcome
            raise CompilerError(f"target {target.name!r}: {outcome}")
        log_text = log_file.read_text(errors="replace")
        raise CompilerError(
            f"target {target.name!r}: the compiler died ({_how(child.returncode)}). "
            f"Its last words: {last_words(log_text)}"
        )


def _command() -> Sequence[str]:
    return (sys.executable, "-m", "remat_scan._compile")


def _wait(child: Any, target: Target, timeout: float | None, progress: bool) -> None:
    start = time.monotonic()
    shown = progress and sys.stderr.isatty()
    while child.poll() is None:
        waited = time.monotonic() - start
        if timeout is not None and waited > timeout:
            raise TimeoutError(
                f"target {target.name!r}: not compiled after {timeout:g} s; timeout=... sets the limit."
            )
        if shown and waited > 3:
            sys.stderr.write(f"\rcompiling for {target.name} … {waited:.0f} s ")
            sys.stderr.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2 if waited < 3 else 1.0)
    if shown and time.monotonic() - start > 3:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


@contextlib.contextmanager
def _ended(child: Any) -> Iterator[None]:
    """Whatever happens, the child and its own children are gone afterwards."""
    try:
        yield
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def last_words(log: str) -> str:
    """The line that says why: a failed check, a fatal or an error message, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in (r"Check fail", r"^F\d{4} ", r"UNAVAILABLE|No PTX", r"Error\b", r"^E\d{4} "):
        for line in reversed(lines):
            if re.search(pattern, line):
                return line[:1000]
    return lines[-1][:1000] if lines else "none"


def _main(job_file: str, result_file: str) -> None:
    from jax import export

    job, target = pickle.loads(Path(job_file).read_bytes())
    job = dataclasses.replace(job, exported=export.deserialize(bytearray(job.exported)))
    try:
        outcome: Any = compile_here(job, target)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    partial = Path(result_file + ".part")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(result_file)


if __name__ == "__main__":
    # Run as a module, this file's classes would be `__main__`'s; the parent knows them by this name.
    from remat_scan import _compile

    _compile._main(*sys.argv[1:])
