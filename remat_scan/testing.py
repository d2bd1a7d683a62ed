"""For the tests of your own project: pin a peak, prove isolation, notice when memory moves.

None of this needs an accelerator. The fixture `memory_snapshot` comes with the installed package.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._memory import MemoryReport, format_bytes, memory_report
from ._verify import Verdict, verify

_FIGURES = ("needs", "peak", "temporaries", "arguments", "outputs", "aliased", "host", "flops")


def assert_peak_below(
    fn: Callable[..., Any],
    *args: Any,
    bytes: int | float,
    target: str = "cpu",
    timeout: float | int | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Asserts that the compiled program needs less memory than `bytes` on each device.

    ```python
    def test_step_fits():
        assert_peak_below(step, weights, batch, target="h100:8", bytes=60 * 2**30)
    ```

    **Arguments:**

    - `fn`, `args`, `kwargs`, `target`, `timeout`: as for [`remat_scan.memory_report`][].
    - `bytes`: the limit. It is compared with the report's `peak`; with `needs` where the compiler
      gives no peak (on CPU) and for a program that does not fit.

    **Returns:**

    The [`remat_scan.MemoryReport`][].

    **Raises:** `AssertionError`, which shows what is alive at the peak.
    """
    report = memory_report(fn, *args, target=target, timeout=timeout, **kwargs)
    figure = "needs" if report.peak is None else "peak"
    found = getattr(report, figure)
    if found is None or found >= bytes or report.fits is False:
        raise AssertionError(
            f"{figure} {format_bytes(found)} is not below {format_bytes(int(bytes))}:\n{report}"
        )
    return report


def assert_isolated(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "cpu",
    layers: int | None = None,
    timeout: float | int | None = None,
    **kwargs: Any,
) -> Verdict:
    """Asserts that every wrapped layer of `fn` survived the compiler as it was asked for.

    ```python
    def test_layers_stay_apart():
        assert_isolated(jax.grad(loss), weights, x, target="h100:8", layers=35)
    ```

    **Arguments:** those of [`remat_scan.verify`][].

    **Returns:**

    The `Verdict`.

    **Raises:** `AssertionError`, which shows the table and what is wrong.
    """
    verdict = verify(fn, *args, target=target, layers=layers, timeout=timeout, **kwargs)
    if not verdict.ok:
        raise AssertionError(str(verdict))
    return verdict


class MemorySnapshots:
    """What the fixture `memory_snapshot` gives a test: reports kept in files beside the test.

    ```python
    def test_memory(memory_snapshot):
        memory_snapshot(step, weights, batch, target="h100:8", tolerance=0.03)
    ```

    The first time, and when memory has moved on purpose, run pytest with `--memory-snapshot-update`
    and commit the file. A change or an upgrade that moves a figure by more than the tolerance fails
    with both figures, the versions that differ, and what is alive at the peak now and was then.
    """

    def __init__(self, folder: Path, name: str, update: bool) -> None:
        self._folder, self._name, self._update = folder, name, update

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        target: str = "cpu",
        tolerance: float | int = 0.02,
        name: str = "",
        timeout: float | int | None = None,
        **kwargs: Any,
    ) -> MemoryReport:
        """Reports `fn(*args, **kwargs)` and compares with what the file says.

        **Arguments:**

        - `fn`, `args`, `kwargs`, `target`, `timeout`: as for [`remat_scan.memory_report`][].
        - `tolerance`: the relative change of a figure that passes, in either direction.
        - `name`: tells several snapshots of one test for the same target apart.

        **Raises:** `AssertionError` if memory has moved, or if there is no file yet.
        """
        report = memory_report(fn, *args, target=target, timeout=timeout, **kwargs)
        parts = [self._name, *([name] if name else []), target]
        safe = "-".join("".join(c if c.isalnum() or c in "_." else "_" for c in p) for p in parts)
        path = self._folder / f"{safe}.json"
        if self._update:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(json.loads(report.to_json()), indent=1) + "\n")
            return report
        if not path.exists():
            raise AssertionError(
                f"There is no snapshot {path} yet; run pytest with --memory-snapshot-update."
            )
        try:
            before = MemoryReport.from_json(path.read_text())
        except ValueError as error:
            raise AssertionError(
                f"{path} is no snapshot ({error}); write it again with --memory-snapshot-update."
            ) from None
        if difference := describe_difference(before, report, tolerance):
            raise AssertionError(
                f"Memory has moved by more than {100 * tolerance:g} % since {path} was written:\n"
                f"{difference}\nIf that is meant, run pytest with --memory-snapshot-update."
            )
        return report


def describe_difference(before: MemoryReport, now: MemoryReport, tolerance: float | int) -> str:
    """The figures of two reports that differ by more than a tolerance, or `""`."""
    lines = []
    for figure in _FIGURES:
        old, new = getattr(before, figure), getattr(now, figure)
        if old == new or (old is not None and new is not None and _near(old, new, tolerance)):
            continue
        show = str if figure == "flops" else format_bytes
        change = f"{100 * (new - old) / old:+.1f} %" if old and new is not None else ""
        lines.append(f"  {figure:<12}{show(old):>14} → {show(new):>14}  {change}".rstrip())
    if not lines:
        return ""
    for name in sorted({*before.versions, *now.versions}):
        old, new = before.versions.get(name, "none"), now.versions.get(name, "none")
        if old != new:
            lines.append(f"  {name:<12}{old:>14} → {new:>14}")
    was = {(b.shape, b.operation): b.bytes for b in before.buffers}
    are = {(b.shape, b.operation): b for b in now.buffers}
    for key, b in sorted(are.items(), key=lambda kv: -kv[1].bytes)[:8]:
        if not _near(was.get(key, 0), b.bytes, tolerance):
            lines.append(f"  alive at the peak: {format_bytes(was.get(key, 0))} → "
                         f"{format_bytes(b.bytes)}  {b.shape}  {b.source}  {b.operation}")  # fmt: skip
    return "\n".join(lines)


def _near(old: int, new: int, tolerance: float | int) -> bool:
    return abs(new - old) <= tolerance * max(abs(old), abs(new))
