"""How far what this model computes is from a reference: logits, intermediates and gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from . import weights
from .attention import Kernel, Mask
from .layers import KV
from .loss import next_token_loss
from .model import Gemma4
from .reference import Reference

TOP = 10
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
    model: Gemma4, ids: Int[Array, "B T"], **options: Any
) -> tuple[Float[Array, ""], dict[str, Float[Array, "..."]]]:
    """The mean cross-entropy of the next token, and its gradient by the checkpoint's keys; takes the
    options of `Gemma4.hidden`."""
    loss, grads = jax.value_and_grad(lambda m: next_token_loss(m, ids, **options).total)(model)
    return loss, dict(zip(weights.stored_names(model), jax.tree.leaves(grads), strict=True))


def compare_arrays(reference: Reference, got: dict[str, Array]) -> list[ArrayCheck]:
    """Compares those of the arrays that the reference has."""
    checks = []
    for name in filter(reference.names.__contains__, got):
        want = reference.read(name, got[name].shape)
        err = np.abs(want.astype(np.float64) - np.asarray(got[name], np.float64))
        checks.append(ArrayCheck(name, float(err.max()), float(np.abs(want).max())))
    return checks


def compare_gradients(
    reference: Reference, loss: Float[Array, ""], grads: dict[str, Array]
) -> list[ArrayCheck]:
    """Compares what `gradients` returns."""
    stored = {**{f"grad.{name}": x for name, x in grads.items()}, "loss": loss}
    scalars = [name for name in stored if name.endswith(".layer_scalar")]
    last = max(scalars, key=lambda name: int(name.split(".")[-2]))
    scale = max(float(jnp.abs(stored[name]).max()) for name in scalars)
    checks = compare_arrays(reference, stored)
    return [replace(c, scale=scale) if c.name == last else c for c in checks]


def _log_softmax(x: Float[np.ndarray, "N V"]) -> Float[np.ndarray, "N V"]:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _top(x: Float[np.ndarray, "N V"]) -> Int[np.ndarray, "N K"]:
    """The likeliest words; of equals the first."""
    return np.argsort(-x, axis=-1, kind="stable")[:, :TOP]
