"""What the site makes from other files while it is built, so that no figure is copied by hand.

- `{{ peak: case / target / way }}` in a page: GiB from `benchmarks/results/isolation.json`;
- `{{ alive: way }}`: the same from `schedule.json`, the program that the plots are drawn from;
- `{{ report: way }}`: the report of that program; `{{ table: name }}`: all rows of a result file,
  `{{ peaks: name }}`: their peaks, side by side;
- `{{ attempts }}`: what was tried on Gemma-4, from `attempts.json`;
- `{{ columns: name / target / column, column }}`: some columns of a result file's rows for a target;
- `{{ printed }}`: what the block of code before it prints; the code of such a page is run;
- `{{ examples }}`: the list of examples, each with a page and a notebook made from its script;
- `plots/*.svg`: plots, each for light and for dark pages.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "__init__")
SHOWN = ("no remat", "jax.checkpoint", "loop", "barrier")
GIB = 2**30
PRINTED = "{{ printed }}"


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gib(size: int | None) -> str:
    return "–" if size is None else f"{size / GIB:.2f}"


def fill(markdown: str, name: str = "page.md") -> str:
    """The page with its `{{ ... }}` replaced; an unknown one is a KeyError and fails the build."""
    if PRINTED in markdown:
        markdown = _with_output(markdown, name)
    return re.sub(r"\{\{ (\w+)(?:: (.*?))? \}\}", lambda m: _FILL[m[1]](m[2] or ""), markdown)


def _with_output(markdown: str, name: str) -> str:
    """Runs the code of a page, and shows what a block printed where the page asks for it."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax: plugins must not look for hardware
    namespace: dict[str, Any] = {"__name__": "__main__"}
    page, end, printed = [], 0, ""
    for part in re.finditer(rf"^```python\n(.*?)^```|{PRINTED}", markdown, re.M | re.S):
        page.append(markdown[end : part.start()])
        end = part.end()
        if part[0] == PRINTED:
            page.append(f"```text\n{printed.rstrip()}\n```")
            continue
        page.append(part[0])
        before = markdown[: part.start()].count("\n") + 1
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * before + part[1], name, "exec"), namespace)
        printed = out.getvalue()
    return "".join([*page, markdown[end:]])


def _peak(key: str) -> str:
    case, target, way = key.split(" / ")
    (row,) = [
        r
        for r in load("isolation")
        if (r["case"], r["target"], r["configuration"]) == (case, target, way)
    ]
    return gib(row["peak_bytes"])


def _alive_row(way: str) -> dict[str, Any]:
    (row,) = [r for r in load("schedule") if r["configuration"] == way]
    return row


def _report(way: str) -> str:
    from remat_scan import MemoryReport

    report = MemoryReport.from_json(json.dumps(_alive_row(way)["report"]))
    return f"```text\n{report.table(top=5)}\n```"


def _table(name: str) -> str:
    if name == "overhead":
        lines = ["| configuration | trace | compile | step |", "|---|---|---|---|"]
        for r in load(name):
            ratios = [f"{r[f'{part}_ratio']:.2f}" for part in ("trace", "compile", "step")]
            lines.append(f"| {r['configuration']} | {' | '.join(ratios)} |")
        return "\n".join(lines)
    lines = ["| case | target | configuration | peak | needs | host | TFLOP |", "|---" * 7 + "|"]
    for r in sorted(load(name), key=lambda r: (r["target"], r.get("layers", 0), r["case"])):
        sizes = [gib(r.get(f"{figure}_bytes")) for figure in ("peak", "needs", "host")]
        lines.append(
            f"| {r['case']} | {r['target']} | {r['configuration']} | {' | '.join(sizes)} | "
            f"{r['flops'] / 1e12:,.0f} |"
        )
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
    used = sorted({f"{p} {r[p]}" for r in load(name) for p in packages if p in r})
    return "\n".join(lines) + f"\n\nGiB a device. {', '.join(used)}."


def _peaks(name: str) -> str:
    """The peaks alone: a row for each case and target, a column for each configuration."""
    rows = load(name)
    ways = list(dict.fromkeys(r["configuration"] for r in rows))
    lines = [f"| case | target | {' | '.join(ways)} |", "|---|---|" + "--:|" * len(ways)]
    for case, target in dict.fromkeys((r["case"], r["target"]) for r in rows):
        peaks = {r["configuration"]: gib(r["peak_bytes"]) for r in rows
                 if (r["case"], r["target"]) == (case, target)}  # fmt: skip
        lines.append(f"| {case} | {target} | {' | '.join(peaks.get(w, '–') for w in ways)} |")
    return "\n".join(lines)


def _columns(key: str) -> str:
    """Bytes as GiB, cycles in millions; a row that has none of the columns is left out."""
    name, target, columns = key.split(" / ")
    wanted = columns.split(", ")
    heads = [re.sub("_seconds$", ", s", re.sub("_bytes$", "", c)).replace("_", " ") for c in wanted]
    lines = [f"| configuration | {' | '.join(heads)} |", "|---|" + "--:|" * len(wanted)]
    for r in load(name):
        if r["target"] == target and any(r.get(c) is not None for c in wanted):
            case = f"{r['case']}, " if len({q["case"] for q in load(name)}) > 1 else ""
            cells = [_cell(column, r.get(column)) for column in wanted]
            lines.append(f"| {case}{r['configuration']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "–"
    if column.endswith("_bytes"):
        return gib(int(value))
    scale = {"flops": 1e12, "estimated_cycles": 1e6}.get(column, 1)
    return f"{value / scale:,.{0 if scale > 1 else 2}f}"


def _attempts(_: str) -> str:
    lines = ["| attempt | expected | peak | what came of it |", "|---|---|--:|---|"]
    rows = load("attempts")
    for r in rows:
        alike = (r["case"], r["target"]) == (rows[0]["case"], rows[0]["target"])
        where = "" if alike else f" ({r['case']}, {r['target']})"
        cells = (r["attempt"] + where, r["predicted"] or "–", gib(r["peak_bytes"]), r["found"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _examples(_: str) -> str:
    return "\n".join(f"- [{_title(p)}](examples/{p.stem}.md)" for p in EXAMPLES)


_FILL = {
    "peak": _peak,
    "alive": lambda way: gib(_alive_row(way)["peak_bytes"]),
    "scatters": lambda way: str(_alive_row(way)["reduce_scatters"]),
    "found": lambda way: gib(_alive_row(way)["peak_found_bytes"]),
    "report": _report,
    "table": _table,
    "peaks": _peaks,
    "columns": _columns,
    "attempts": _attempts,
    "examples": _examples,
}


def _title(script: Path) -> str:
    return next(line[4:] for line in script.read_text().splitlines() if line.startswith("# # "))


def cells(script: Path) -> list[tuple[str, str]]:
    """The cells of a script in percent format: `("markdown", text)` or `("code", source)`."""
    found = []
    for cell in re.split(r"^# %%", script.read_text(), flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if head.strip() == "[markdown]":
            text = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
            found.append(("markdown", "\n".join(text).strip()))
        else:
            found.append(("code", body.strip()))
    return found


def as_markdown(script: Path) -> str:
    """A page from a script: comments become text, code stays code."""
    page = [
        text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells(script)
    ]
    offer = (
        f"[Download as a notebook]({script.stem}.ipynb). The script is `examples/{script.name}`."
    )
    return "\n\n".join([page[0], offer, *page[1:]]) + "\n"


def as_notebook(script: Path) -> str:
    """A Jupyter notebook (format 4.5) from a script, with nothing run yet."""
    made = []
    for i, (kind, text) in enumerate(cells(script)):
        cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": text}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1) + "\n"


# -- Plots -----------------------------------------------------------------------------------------


def plots() -> dict[str, str]:
    """SVG by file name."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    made = {}
    for theme, ink in (("light", "#222222"), ("dark", "#e0e0e0")):
        colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style = dict.fromkeys(colours, ink) | {
            "svg.hashsalt": "remat_scan",
            "font.size": 11,
            "axes.facecolor": "none",
            "figure.facecolor": "none",
            "legend.framealpha": 0.0,
        }
        with mpl.rc_context(style):
            for name, draw in (
                ("depth", _depth),
                ("length", _length),
                ("alive", _alive),
                ("lives", _lives),
            ):
                figure, text = draw(plt), io.StringIO()
                figure.savefig(
                    text,
                    format="svg",
                    transparent=True,
                    bbox_inches="tight",
                    metadata={"Date": None},
                )
                plt.close(figure)
                made[f"plots/{name}-{theme}.svg"] = text.getvalue()
    return made


def _depth(plt: Any) -> Any:
    figure, ax = plt.subplots(figsize=(6, 3.6))
    rows = load("depth")
    for way in dict.fromkeys(r["configuration"] for r in rows):
        points = sorted((r["layers"], r["peak_bytes"]) for r in rows if r["configuration"] == way)
        ax.plot([n for n, _ in points], [p / GIB for _, p in points], "o-", label=way)
    ax.set(xlabel="layers", ylabel="peak, GiB a device", ylim=0)
    ax.grid(alpha=0.3)
    ax.legend()
    return figure


def _length(plt: Any) -> Any:
    figure, ax = plt.subplots(figsize=(6, 3.6))
    rows = load("length")
    for way in dict.fromkeys(r["configuration"] for r in rows):
        points = sorted((r["tokens"], r["peak_bytes"]) for r in rows if r["configuration"] == way)
        ax.plot([n for n, _ in points], [p / GIB for _, p in points], "o-", label=way)
    ax.set(xlabel="tokens a device", ylabel="peak, GiB a device", ylim=0)
    ax.grid(alpha=0.3)
    ax.legend()
    return figure


def _panels(plt: Any) -> tuple[Any, list[tuple[Any, dict[str, Any]]]]:
    figure, axes = plt.subplots(len(SHOWN), 1, figsize=(6, 8), sharey=True, layout="constrained")
    return figure, [(ax, _alive_row(way)) for ax, way in zip(axes, SHOWN, strict=True)]


def _alive(plt: Any) -> Any:
    figure, panels = _panels(plt)
    for ax, row in panels:
        alive = {k: [b / GIB for b in series] for k, series in row["alive_bytes"].items()}
        at = [100 * i / (len(alive["arguments"]) - 1) for i in range(len(alive["arguments"]))]
        ax.stackplot(at, *alive.values(), labels=list(alive), linewidth=0)
        ax.set(title=row["configuration"], ylabel="GiB alive", xlim=(0, 100))
    panels[1][0].legend(loc="upper left", fontsize=9, ncols=2)
    panels[-1][0].set_xlabel("position in the schedule, %")
    return figure


def _lives(plt: Any) -> Any:
    figure, panels = _panels(plt)
    for ax, row in panels:
        bars = [(100 * b / row["steps"], 100 * (e + 1 - b) / row["steps"])
                for b, e, _ in row["wide_activations"]]  # fmt: skip
        for i, (begin, length) in enumerate(bars):
            ax.barh(i, length, left=begin, height=1.0, color="C2")
        ax.set(title=row["configuration"], ylabel="buffer", xlim=(0, 100))
        ax.invert_yaxis()
    panels[-1][0].set_xlabel("position in the schedule, %")
    return figure


# -- Called by mkdocs ------------------------------------------------------------------------------


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for script in EXAMPLES:
        page = f"examples/{script.stem}.md"
        files.append(File.generated(config, page, content=as_markdown(script)))
        notebook = f"examples/{script.stem}.ipynb"
        files.append(File.generated(config, notebook, content=as_notebook(script)))
    for name, svg in plots().items():
        files.append(File.generated(config, name, content=svg))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return fill(markdown, page.file.src_uri)
