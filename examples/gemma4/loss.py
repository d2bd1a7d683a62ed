"""Next-word loss over a large vocabulary that never holds all logits at once."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .model import Gemma4, softcap

IGNORE = -100


class Loss(eqx.Module):
    """Means over the tokens that count.

    **Attributes:** `total` is what to minimise, `cross_entropy` plus `z_loss`; `tokens` is how many
    counted. With no such token all are zero.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]
    tokens: Int[Array, ""]


def cross_entropy(
    hidden: Float[Array, "B T d"],
    table: Float[Array, "V d"],
    labels: Int[Array, "B T"],
    *,
    softcap_at: float | None = None,
    block_tokens: int = 4096,
    ignore: int = IGNORE,
    z_loss: float = 0.0,
) -> Loss:
    """Cross-entropy of `softcap(hidden @ table.T)` with `labels`.

    A scan over blocks of tokens, each a checkpoint: at most `block_tokens` tokens' logits exist at
    a time, forward or backward, and the table's gradient is summed in the scan's carry, in the
    table's dtype. Blocks are cut along the sequence as far as that goes, so a batch split over
    devices stays split.

    **Arguments:**

    - `ignore`: the label of tokens that do not count.
    - `z_loss`: weight of `logsumexp(logits)**2`, which keeps the logits from drifting (PaLM,
        arXiv:2204.02311, section 5).
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    B, T = labels.shape
    rows = min(B, block_tokens)
    columns = min(T, block_tokens // rows)
    hidden = _blocks(hidden, rows, columns, 0)
    labels = _blocks(labels, rows, columns, ignore)

    @jax.checkpoint
    def block(h: Float[Array, "R C d"], label: Int[Array, "R C"], table: Array) -> Array:
        logits = jnp.einsum(
            "bcd,vd->bcv", h, table.astype(h.dtype), preferred_element_type=jnp.float32
        )
        logits = softcap(logits, softcap_at)
        norm = jax.nn.logsumexp(logits, axis=-1)
        # A sum, not a gather: it fuses, and works on a vocabulary split over devices.
        own = jnp.arange(logits.shape[-1]) == label[..., None]
        picked = jnp.where(own, logits, 0).sum(-1)
        counts = label != ignore
        return jnp.stack(
            [jnp.where(counts, norm - picked, 0).sum(), jnp.where(counts, norm**2, 0).sum()]
        )

    def step(sums: Array, xs: tuple[Array, Array]) -> tuple[Array, None]:
        return sums + block(*xs, table), None

    (nll, squares), _ = jax.lax.scan(step, jnp.zeros(2), (hidden, labels))
    tokens = (labels != ignore).sum()
    count = jnp.maximum(tokens, 1)
    nll, z = nll / count, z_loss * squares / count
    return Loss(nll + z, nll, z, tokens)


def next_token_labels(
    ids: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T"]:
    """Each token's successor; `IGNORE` where there is none, or it is padding or another document."""
    same = jnp.ones(ids[:, 1:].shape, bool)
    if valid is not None:
        same &= valid[:, 1:] & valid[:, :-1]
    if segments is not None:
        same &= segments[:, 1:] == segments[:, :-1]
    return jnp.pad(jnp.where(same, ids[:, 1:], IGNORE), ((0, 0), (0, 1)), constant_values=IGNORE)


def next_token_loss(
    model: Gemma4,
    ids: Int[Array, "B T"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    block_tokens: int = 4096,
    z_loss: float = 0.0,
    **options: Any,
) -> Loss:
    """The training loss of a batch; further options are those of `Gemma4.hidden`."""
    return cross_entropy(
        model.hidden(ids, valid=valid, segments=segments, **options),
        model.embed_tokens.weight,
        next_token_labels(ids, valid, segments),
        softcap_at=model.config.final_logit_softcapping,
        block_tokens=block_tokens,
        z_loss=z_loss,
    )


def _blocks(x: Array, rows: int, columns: int, fill: int) -> Array:
    """[B, T, ...] cut into [blocks, rows, columns, ...], padded with `fill`."""
    (B, T), rest = x.shape[:2], x.shape[2:]
    x = jnp.pad(
        x,
        [(0, -B % rows), (0, -T % columns)] + [(0, 0)] * len(rest),
        constant_values=fill,
    )
    x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(-1, rows, columns, *rest)
