"""Does this model compute what a saved reference says? `python -m examples.gemma4.check_logits -h`

The reference is an `.npz` file with `input_ids` [B,T] and `logits` [B,T,V], and what else was
recorded: the same under `padded.` and `left.` with an `attention_mask`; `decode.prompt`,
`decode.tokens` and `decode.step_logits`; intermediates (`inputs_embeds`, `ple`, `final_norm_out`,
`attn_out.i`, `mlp_out.i`, `layer_out.i` of layer i); `loss`, the mean cross-entropy of the next
token, and its gradients `grad.<key of the checkpoint>`.
"""

import argparse
import contextlib
import json
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from . import weights
from .attention import KERNELS, Kernel, Mask
from .config import load_config
from .layers import KV
from .loss import next_token_loss
from .model import Gemma4
from .quoting import shown

TOP = 10
_INTERMEDIATES = (
    *("inputs_embeds", "ple", "final_norm_out"),
    *("attn_out", "mlp_out", "layer_out"),
)
_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Candidate:
    """A word among the likeliest: its rank and logit in the reference and in this model."""

    token: int
    rank: int
    reference: float
    logit: float
    own_rank: int


@dataclass(frozen=True)
class LogitCheck:
    """How the logits of one batch compare, over its `tokens` that are not padding.

    **Attributes:**

    - `mean_kl`, `max_kl`: of the Kullback-Leibler divergence KL(reference, model) per token, in nats.
    - `max_abs_err`: of the logits.
    - `top_1`: the share of tokens with the same likeliest word.
    - `overlap`: the share of the reference's ten likeliest words that are among the model's ten.
    - `rank_agreement`: the share of the ten ranks that hold the same word in both.
    - `worst`, `candidates`: the token (row, column) with the largest divergence, and its ten words.
    """

    name: str
    tokens: int
    mean_kl: float
    max_kl: float
    max_abs_err: float
    top_1: float
    overlap: float
    rank_agreement: float
    worst: tuple[int, int]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class ArrayCheck:
    """The largest error of an array, absolute and over `scale`, its largest number.

    The gradient of the last layer's scalar, which the last norm undoes, is nothing but rounding: its
    scale is the largest gradient of all such scalars.
    """

    name: str
    max_abs_err: float
    scale: float

    @property
    def max_rel_err(self) -> float:
        if self.max_abs_err == 0:
            return 0.0
        return self.max_abs_err / self.scale if self.scale else math.inf


def compare_logits(
    name: str,
    logits: Callable[[Int[np.ndarray, " N"], Int[np.ndarray, " N"]], Float[Array, "N V"]],
    reference: Float[np.ndarray, "B T V"],
    valid: Bool[np.ndarray, "B T"],
) -> LogitCheck:
    """Compares in float64, some tokens at a time.

    **Arguments:**

    - `logits`: gives the model's logits of the tokens at some rows and columns.
    """
    rows, columns = np.nonzero(valid)
    kl, err, overlap, ranks, first = [], [], [], [], []
    for i in range(0, len(rows), _BLOCK_TOKENS):
        at = rows[i : i + _BLOCK_TOKENS], columns[i : i + _BLOCK_TOKENS]
        want = reference[at].astype(np.float64)
        got = np.asarray(logits(*at)).astype(np.float64)
        p, q = _log_softmax(want), _log_softmax(got)
        kl.append((np.exp(p) * (p - q)).sum(-1))
        err.append(np.abs(want - got).max(-1))
        best, own = _top(want), _top(got)
        overlap.append((best[:, :, None] == own[:, None]).any(-1).mean(-1))
        ranks.append((best == own).mean(-1))
        first.append(best[:, 0] == own[:, 0])
    each = np.concatenate(kl)
    worst = int(np.argmax(np.where(np.isnan(each), np.inf, each)))
    row, column = int(rows[worst]), int(columns[worst])
    want = reference[row, column].astype(np.float64)
    got = np.asarray(logits(rows[worst : worst + 1], columns[worst : worst + 1]))[0]
    return LogitCheck(
        name,
        len(rows),
        float(each.mean()),
        float(each.max()),
        float(np.concatenate(err).max()),
        float(np.concatenate(first).mean()),
        float(np.concatenate(overlap).mean()),
        float(np.concatenate(ranks).mean()),
        (row, column),
        tuple(
            Candidate(int(t), i, float(want[t]), float(got[t]), int((got > got[t]).sum()) + 1)
            for i, t in enumerate(_top(want[None])[0], 1)
        ),
    )


def intermediates(
    model: Gemma4, ids: Int[Array, "B T"], kernel: Kernel = "auto"
) -> dict[str, Float[Array, "..."]]:
    """What the model computes on its way, under the reference's names."""
    taken: dict[str, Array] = {}

    def tapped(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        return _Tap(fn, lambda out: taken.update({name: out}))

    B, T = ids.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    h = taken["inputs_embeds"] = model.embed(ids)
    ple = taken["ple"] = model.per_layer_inputs(ids, h)
    made: dict[str, KV] = {}
    for i, (layer, kind) in enumerate(zip(model.layers, model.config.layer_types, strict=True)):
        layer = eqx.tree_at(
            lambda layer: (layer.self_attn.o_proj, layer.mlp),
            layer,
            (tapped(layer.self_attn.o_proj, f"attn_out.{i}"), tapped(layer.mlp, f"mlp_out.{i}")),
        )
        shared = made[kind] if layer.reads else None
        out = layer(h, ple[:, :, i], positions, Mask(), kernel, shared=shared)
        h = out if layer.reads else out[0]
        if not layer.reads:
            made[kind] = out[1]
        taken[f"layer_out.{i}"] = h
    taken["final_norm_out"] = model.norm(h)
    return taken


class _Tap(eqx.Module):
    fn: Callable[..., Any]
    record: Callable[[Array], None] = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        out = self.fn(x)
        self.record(out)
        return out


def gradients(
    model: Gemma4, ids: Int[Array, "B T"], kernel: Kernel = "auto"
) -> tuple[Float[Array, ""], dict[str, Float[Array, "..."]]]:
    """The mean cross-entropy of the next token, and its gradient by the checkpoint's keys."""
    loss, grads = jax.value_and_grad(lambda m: next_token_loss(m, ids, kernel=kernel).total)(model)
    return loss, dict(zip(weights.stored_names(model), jax.tree.leaves(grads), strict=True))


def compare_arrays(
    reference: "Reference", names: dict[str, str], got: dict[str, Array]
) -> list[ArrayCheck]:
    """**Arguments:** `names`: which of the reference's arrays to compare with which of `got`."""
    checks = []
    for stored, name in names.items():
        want = reference.read(stored, got[name].shape)
        err = np.abs(want.astype(np.float64) - np.asarray(got[name], np.float64))
        checks.append(ArrayCheck(stored, float(err.max()), float(np.abs(want).max())))
    return checks


def _log_softmax(x: Float[np.ndarray, "N V"]) -> Float[np.ndarray, "N V"]:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _top(x: Float[np.ndarray, "N V"]) -> Int[np.ndarray, "N K"]:
    """The likeliest words; of equals the first."""
    return np.argsort(-x, axis=-1, kind="stable")[:, :TOP]


# -- The reference -----------------------------------------------------------------------------------


# What Python's zip reader raises for damaged and for encrypted files.
_BROKEN = (zipfile.BadZipFile, RuntimeError, zlib.error, EOFError)
# Beyond that, once the file is open: offsets that lead out of it.
_DAMAGED = (OSError, *_BROKEN)


class Reference:
    """The arrays of an `.npz` file, which may come from a stranger.

    Nothing in it is executed, and an array is read only if its header fits both what is wanted and
    the size of the file.
    """

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
        except _BROKEN as error:
            raise ValueError(f"{path}: expected an .npz file: {shown(error)}") from error
        self._path = path
        files = (i.filename for i in self._zip.infolist())
        self.names = {name.removesuffix(".npy") for name in files if name.endswith(".npy")}

    def shape(self, name: str) -> tuple[int, ...]:
        with self._member(name) as (_, shape, _):
            return shape

    def read(self, name: str, shape: tuple[int | None, ...], kinds: str = "f") -> Any:
        """**Arguments:** `shape`: what is wanted, `None` for any size; `kinds`: NumPy's dtype kinds."""
        with self._member(name) as (file, found, dtype):
            fits = len(found) == len(shape) and all(
                w in (None, n) for w, n in zip(shape, found, strict=True)
            )
            if not fits or dtype.kind not in kinds or 0 in found:
                wanted = ", ".join("any" if n is None else str(n) for n in shape)
                types = " or ".join({"f": "float", "i": "int", "b": "bool"}[k] for k in kinds)
                raise ValueError(
                    f"{self._path}: {name}: expected {types} [{wanted}], found {dtype} "
                    f"{list(found)}"
                )
            try:
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
            except (ValueError, *_DAMAGED) as error:
                raise ValueError(f"{self._path}: {name}: corrupted: {shown(error)}") from error

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, tuple[int, ...], np.dtype]]:
        if name not in self.names:
            raise ValueError(f"{self._path} has no {name!r}")
        info = self._zip.getinfo(name + ".npy")
        # NumPy stores or deflates, which packs a thousandfold at best.
        known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if not known or info.file_size > 1100 * info.compress_size + 1024:
            raise ValueError(
                f"{self._path}: {name}: expected {info.file_size} bytes, stored or deflated, found "
                f"{info.compress_size} by method {info.compress_type}"
            )
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(self._zip.open(info))
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[np.lib.format.read_magic(file)]
                shape, _, dtype = read(file)
            except (ValueError, KeyError, *_DAMAGED) as error:
                raise ValueError(
                    f"{self._path}: {name}: not a NumPy array: {shown(error)}"
                ) from error
            if file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
                raise ValueError(
                    f"{self._path}: {name}: expected {math.prod(shape) * dtype.itemsize} bytes for "
                    f"{dtype} {list(shape)}, found {info.file_size - file.tell()}"
                )
            yield file, shape, dtype


class Batch(NamedTuple):
    """Tokens, and the reference's logits of those from `start` on."""

    name: str
    ids: Int[np.ndarray, "B T"]
    valid: Bool[np.ndarray, "B T"] | None
    start: int
    logits: Float[np.ndarray, "B S V"]


def batches(reference: Reference, model: Gemma4) -> Iterator[Batch]:
    """What the reference has logits for: its batch, and the padded and decoded ones if it has them."""
    V = model.config.vocab_size
    words = min(V, model.config.vocab_size_per_layer_input)

    def read_ids(name: str, rows: int | None = None) -> Any:
        ids = reference.read(name, (rows, None), "i")
        if ids.min() < 0 or ids.max() >= words:
            raise ValueError(
                f"{name}: expected ids below {words}, the model's vocabulary, found {ids.min()} to "
                f"{ids.max()}"
            )
        return ids.astype(np.int32)

    for prefix in ("", "padded.", "left."):
        if prefix and prefix + "logits" not in reference.names:
            continue
        ids = read_ids(prefix + "input_ids")
        valid = None
        if prefix + "attention_mask" in reference.names:
            valid = reference.read(prefix + "attention_mask", ids.shape, "ib") != 0
            if not valid.any():
                raise ValueError(f"{prefix}attention_mask: expected a valid token, found none")
        logits = reference.read(prefix + "logits", (*ids.shape, V))
        yield Batch(prefix.removesuffix(".") or "batch", ids, valid, 0, logits)
    if "decode.step_logits" in reference.names:
        prompt = read_ids("decode.prompt")
        ids = np.concatenate([prompt, read_ids("decode.tokens", len(prompt))], axis=1)
        start = prompt.shape[1] - 1
        logits = reference.read("decode.step_logits", (len(ids), ids.shape[1] - start, V))
        yield Batch("decode", ids, None, start, logits)


# -- The command -------------------------------------------------------------------------------------


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
        (options.intermediates, _INTERMEDIATES, "intermediates"),
        (options.gradients, ("grad",), "gradients"),
    ):
        if asked and not any(n.split(".")[0] in kinds for n in reference.names):
            raise ValueError(f"{options.reference} has no {name} to check")
    like = None
    if options.dtype is not None:
        like = weights.abstract(load_config(options.checkpoint), options.dtype)
    model = weights.load(options.checkpoint, like)
    compared = [_check_batch(model, batch, options.kernel) for batch in batches(reference, model)]
    ids = jnp.asarray(reference.read("input_ids", (None, None), "i"), jnp.int32)
    inner: list[ArrayCheck] = []
    grads: list[ArrayCheck] = []
    if options.intermediates:
        got = eqx.filter_jit(intermediates)(model, ids, options.kernel)
        inner = compare_arrays(reference, {n: n for n in got if n in reference.names}, got)
    if options.gradients:
        loss, got = eqx.filter_jit(gradients)(model, ids, options.kernel)
        got["loss"] = loss
        names = {n: n if n == "loss" else f"grad.{n}" for n in got}
        stored = {s: n for n, s in names.items() if s in reference.names}
        grads = _same_scale(compare_arrays(reference, stored, got), got)
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


def _same_scale(checks: list[ArrayCheck], got: dict[str, Array]) -> list[ArrayCheck]:
    scalars = [name for name in got if name.endswith(".layer_scalar")]
    last = max(scalars, key=lambda name: int(name.split(".")[-2]))
    scale = max(float(jnp.abs(got[name]).max()) for name in scalars)
    return [
        ArrayCheck(c.name, c.max_abs_err, scale) if c.name == f"grad.{last}" else c for c in checks
    ]


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
    try:
        result = check(options)
    except KeyboardInterrupt:
        print("check_logits: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError) as error:
        print(f"check_logits: {error or type(error).__name__}", file=sys.stderr)
        return 2
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
        "--max-kl-div", type=_limit, metavar="X",
        help="limit of each token's KL divergence in nats "
        f"({_DEFAULT_KL} where no limit is given)",
    )  # fmt: skip
    parser.add_argument(
        "--max-abs-err", type=_limit, metavar="Y", help="limit of each logit's error"
    )
    parser.add_argument(
        "--max-rel-err", type=_limit, default=1e-4, metavar="Z",
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
    return parser


def _limit(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")


if __name__ == "__main__":
    sys.exit(main())
