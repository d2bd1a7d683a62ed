"""Result files: one list of rows for each sub-command, each row remade only when it is missing."""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat_scan import MemoryReport

FOLDER = Path(__file__).parent / "results"


def load(name: str) -> list[dict[str, Any]]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def save(name: str, rows: list[dict[str, Any]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    partial = FOLDER / f"{name}.json.part"
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.rename(FOLDER / f"{name}.json")


def measure(
    name: str,
    key: dict[str, Any],
    versions: dict[str, str],
    make: Callable[[], MemoryReport],
    again: bool,
    more: Callable[[MemoryReport], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """The row for `key` and these versions from the file, or a new one, which is stored at once.

    `compile_seconds` is the wall's time, and depends on what else the machine does; `cpu_seconds` is
    the compiling process's own, its start included. `more` adds figures of its own.
    """
    rows = load(name)
    for row in rows:
        if all(row.get(k) == v for k, v in (key | versions).items()) and not again:
            return row
    before = _cpu_seconds()
    report = make()
    row = key | {
        "needs_bytes": report.needs,
        "peak_bytes": report.peak,
        "temp_bytes": report.temporaries,
        "host_bytes": report.host,
        "flops": report.flops,
        "compile_seconds": round(report.compile_seconds, 1),
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        **more(report),
        **versions,
        **made_by(),
    }
    kept = [r for r in load(name) if any(r[k] != v for k, v in key.items())]
    save(name, [*kept, row])
    return row


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def made_by() -> dict[str, str]:
    """The flags of whoever ran it, and the commit."""
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    return {"flags": flags.strip(), "commit": commit()}


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER.parent
    )
    return found.stdout.strip() or "unknown"
