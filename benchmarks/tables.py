"""`python -m benchmarks tables`: the README's tables and the plots, made from the result files."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .results import load
from .stack import ISOLATION

ROOT = Path(__file__).parent.parent


def tables(options: argparse.Namespace) -> None:
    """Writes the README's tables and the plots from the result files."""
    del options
    text = (ROOT / "README.md").read_text()
    for name, make in (("isolation", _isolation_table), ("overhead", _overhead_table)):
        begin, end = f"<!-- {name}: made by python -m benchmarks tables -->", f"<!-- end {name} -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + "\n" + make(load(name)) + "\n" + end + rest.split(end)[1]
    (ROOT / "README.md").write_text(text)
    try:
        _plot_depth(load("depth"))
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)


def _isolation_table(rows: list[dict[str, Any]]) -> str:
    ways = ["no remat", "jax.checkpoint", "loop", "barrier", "loop, input on host"]
    lines = [
        "| peak GiB a device | " + " | ".join(f"`{w}`" if "." in w else w for w in ways) + " |",
        "|---" * (len(ways) + 1) + "|",
    ]
    found = {(r["case"], r["target"], r["configuration"]): r["peak_bytes"] for r in rows}
    for case, targets in ISOLATION.items():
        for target, stack in targets.items():
            peaks = [found.get((case, target, way)) for way in ways]
            if not any(peaks):
                continue
            best = min(p for p in peaks[:4] if p)
            cells = [
                "–" if p is None else f"**{p / 2**30:.2f}**" if p == best else f"{p / 2**30:.2f}"
                for p in peaks
            ]
            lines.append(f"| {target}, {stack.layers} layers, {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n<sub>{', '.join(_versions(rows))}</sub>"


def _versions(rows: list[dict[str, Any]]) -> list[str]:
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
    return sorted({f"{name} {row[name]}" for row in rows for name in packages if name in row})


def _overhead_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| 24 layers, CPU, × `jax.checkpoint` | trace | compile | step |", "|---|---|---|---|"]
    lines += [
        f"| {r['configuration']} | {r['trace_ratio']:.2f} | {r['compile_ratio']:.2f} | "
        f"{r['step_ratio']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def _plot_depth(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    if not rows:
        return
    fig, ax = plt.subplots(figsize=(6, 3.6))
    for way in dict.fromkeys(r["configuration"] for r in rows):
        points = sorted((r["layers"], r["peak_bytes"]) for r in rows if r["configuration"] == way)
        ax.plot([n for n, _ in points], [p / 2**30 for _, p in points], "o-", label=way)
    ax.set(xlabel="layers", ylabel="peak, GiB a device", title="h100:8, gated MLP, FSDP", ylim=0)
    ax.grid(alpha=0.3)
    ax.legend()
    path = ROOT / "docs" / "depth.svg"
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, bbox_inches="tight", metadata={"Date": None})
