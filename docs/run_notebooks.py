"""Runs the notebooks of the site: `python docs/run_notebooks.py [NAME...]`, or `nox -s notebooks`.

Each is made from its script, has a kernel of its own and checks itself. Two minutes are too long for a
reader: what takes more is marked, what takes ten fails.
"""

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

sys.path.insert(0, str(Path(__file__).parent))

from hooks import EXAMPLES, ROOT, as_notebook

SECONDS, TOO_LONG = 600, 120
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for kernels: plugins must not look for hardware


def run(script: Path) -> str | None:
    """Runs a script as a notebook; what is wrong with it, or `None`."""
    notebook = nbformat.reads(as_notebook(script), as_version=4)
    nbformat.validate(notebook)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in files, not on the network; all kernels' have the same names unless told otherwise.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=str(Path(folder) / "kernel")
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            resources={"metadata": {"path": ROOT}},
        )
        try:
            client.execute()
        except CellExecutionError as error:
            return f"{script.stem}: {error}"
        except TimeoutError:
            return f"{script.stem}: a cell took more than {SECONDS} s"
    taken = time.monotonic() - start
    slow = "  TOO LONG for two idle cores" if taken > TOO_LONG else ""
    print(f"{script.stem:<24}{taken:6.1f} s{slow}", flush=True)
    if not any(cell.get("outputs") for cell in notebook.cells):
        return f"{script.stem}: shows nothing"
    return None


def main(names: list[str]) -> int:
    """Runs all of the examples, or those named, two at a time; 1 if one fails."""
    chosen = [s for s in EXAMPLES if not names or s.stem in names]
    if missing := set(names) - {s.stem for s in chosen}:
        print(f"No example is called {', '.join(sorted(missing))}.", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(2) as pool:
        problems = [p for p in pool.map(run, chosen) if p is not None]
    print(*problems, sep="\n\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
