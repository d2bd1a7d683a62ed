"""Does this model compute what a saved reference says? `python -m examples.gemma4.check_logits -h`"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from . import weights
from .attention import KERNELS
from .command import non_negative, run_command
from .compare import (
    TOP,
    ArrayCheck,
    LogitCheck,
    compare_arrays,
    compare_gradients,
    compare_logits,
    gradients,
    intermediates,
)
from .config import load_config
from .model import Gemma4
from .reference import INTERMEDIATES, Batch, Reference, batches


@dataclass(frozen=True)
class Options:
    checkpoint: Path
    reference: Path
    max_kl_div: float | None
    max_abs_err: float | None
    max_rel_err: float
    intermediates: bool
    gradients: bool
    dtype: str | None
    kernel: str
    json: bool
    debug: bool


@dataclass(frozen=True)
class Result:
    """**Attributes:** `failures`: a sentence for each limit that is broken; with none it passes."""

    logits: list[LogitCheck]
    intermediates: list[ArrayCheck]
    gradients: list[ArrayCheck]
    failures: list[str]

    def to_json(self) -> str:
        fields = asdict(self)
        for kind in ("intermediates", "gradients"):  # dataclasses leave out properties
            for row, check in zip(fields[kind], getattr(self, kind), strict=True):
                row["max_rel_err"] = check.max_rel_err
        text = json.dumps({"verdict": "fail" if self.failures else "pass", **fields})
        # JSON has no NaN and no infinity.
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)


def check(options: Options) -> Result:
    """Loads both sides and compares them.

    **Raises:** `ValueError` or `OSError` if a file is not what it should be.
    """
    reference = Reference(options.reference)
    for asked, kinds, name in (
        (options.intermediates, INTERMEDIATES, "intermediates"),
        (options.gradients, ("grad",), "gradients"),
    ):
        if asked and not any(n.split(".")[0] in kinds for n in reference.names):
            raise ValueError(f"{options.reference} has no {name} to check")
    like = None
    if options.dtype is not None:
        like = weights.abstract(load_config(options.checkpoint), options.dtype)
    model = weights.load(options.checkpoint, like)
    compared = [
        _check_batch(model, batch, options.kernel) for batch in batches(reference, model.config)
    ]
    ids = jnp.asarray(reference.read("input_ids", (None, None), "i"), jnp.int32)
    inner: list[ArrayCheck] = []
    grads: list[ArrayCheck] = []
    if options.intermediates:
        got = eqx.filter_jit(intermediates)(model, ids, options.kernel)
        inner = compare_arrays(reference, got)
    if options.gradients:
        grads = compare_gradients(
            reference, *eqx.filter_jit(gradients)(model, ids, kernel=options.kernel)
        )
    return Result(compared, inner, grads, _failures(options, compared, inner, grads))


def _check_batch(model: Gemma4, batch: Batch, kernel: str) -> LogitCheck:
    valid = None if batch.valid is None else jnp.asarray(batch.valid)
    hidden = eqx.filter_jit(Gemma4.hidden)(
        model, jnp.asarray(batch.ids), valid=valid, kernel=kernel, policy="none", isolation="none"
    )
    counted = np.ones(batch.logits.shape[:2], bool) if batch.valid is None else batch.valid
    return compare_logits(
        batch.name,
        lambda rows, columns: model.head(hidden[rows, columns + batch.start]),
        batch.logits,
        counted,
    )


def _failures(
    options: Options,
    compared: Sequence[LogitCheck],
    inner: Sequence[ArrayCheck],
    grads: Sequence[ArrayCheck],
) -> list[str]:
    failures = []

    def limit(name: str, what: str, value: float, most: float | None) -> None:
        if most is not None and not value <= most:  # NaN fails
            failures.append(f"{name}: {what} is {value:.3g}, the limit is {most:.3g}")

    for c in compared:
        kl = options.max_kl_div
        if kl is None and options.max_abs_err is None:
            kl = _DEFAULT_KL
        limit(c.name, "the largest KL divergence of a token", c.max_kl, kl)
        limit(c.name, "the largest error of a logit", c.max_abs_err, options.max_abs_err)
        # Whatever the limits, a logit that is no number is wrong.
        limit(c.name, "the largest error of a logit", c.max_abs_err, sys.float_info.max)
    for a in (*inner, *grads):
        limit(a.name, "the largest error relative to its scale", a.max_rel_err, options.max_rel_err)
    return list(dict.fromkeys(failures))


_DEFAULT_KL = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code: 0 for the verdict pass, 1 for fail, 2 for bad
    input."""
    options = Options(**vars(_parser().parse_args(argv)))
    # What cannot be compared is no verdict.
    return run_command("check_logits", lambda: _run(options), debug=options.debug, failure=2)


def _run(options: Options) -> int:
    result = check(options)
    if options.json:
        print(result.to_json())
    else:
        _show(options, result)
    return 1 if result.failures else 0


def _show(options: Options, result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)

    def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        table = Table(*columns, title=title, title_justify="left")
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row))
        console.print(table)

    show(
        f"Logits of {options.checkpoint} against {options.reference}",
        ["", "tokens", "mean KL", "max KL", "max error", "top 1", f"top {TOP}", "ranks"],
        (
            (
                *(c.name, c.tokens, c.mean_kl, c.max_kl, c.max_abs_err),
                *(f"{x:.1%}" for x in (c.top_1, c.overlap, c.rank_agreement)),
            )
            for c in result.logits
        ),
    )
    for c in result.logits:
        row, column = c.worst
        show(
            f"{c.name}: the token that differs most (row {row}, column {column})",
            ["rank", "word", "reference", "model", "difference", "rank in model"],
            (
                (w.rank, w.token, w.reference, w.logit, w.logit - w.reference, w.own_rank)
                for w in c.candidates
            ),
        )
    for title, checks in (
        ("Intermediates", result.intermediates),
        ("Gradients", result.gradients),
    ):
        if checks:
            worst = sorted(checks, key=lambda c: -c.max_rel_err)[:TOP]
            show(
                f"{title}: the worst {len(worst)} of {len(checks)}",
                ["", "max error", "scale", "relative"],
                ((c.name, c.max_abs_err, c.scale, c.max_rel_err) for c in worst),
            )
    for failure in result.failures:
        console.print(f"FAIL {failure}", style="red", markup=False)
    if not result.failures:
        console.print("PASS", style="green")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.gemma4.check_logits",
        description="Compare a checkpoint's logits with a saved reference. The exit code is the "
        "verdict: 0 pass, 1 fail, 2 bad input.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR")
    parser.add_argument("--reference", type=Path, required=True, metavar="FILE.npz")
    parser.add_argument(
        "--max-kl-div", type=non_negative, metavar="X",
        help="limit of each token's KL divergence in nats "
        f"({_DEFAULT_KL} where no limit is given)",
    )  # fmt: skip
    parser.add_argument(
        "--max-abs-err", type=non_negative, metavar="Y", help="limit of each logit's error"
    )
    parser.add_argument(
        "--max-rel-err", type=non_negative, default=1e-4, metavar="Z",
        help="limit of intermediates' and gradients' errors, relative to the largest number of the "
        "array (1e-4)",
    )  # fmt: skip
    parser.add_argument(
        "--intermediates", action="store_true", help="compare the stored intermediates too"
    )
    parser.add_argument("--gradients", action="store_true", help="compare the stored gradients too")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="what to compute in (the checkpoint's)"
    )
    parser.add_argument("--kernel", choices=("auto", *KERNELS), default="auto", help="of attention")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
