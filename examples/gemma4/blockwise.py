"""Attention in blocks: memory linear in the length, forward and backward, on any device.

The online softmax of FlashAttention (Dao et al., 2022) in plain JAX. The backward pass is written
out, so the loops may skip the blocks that no query sees and nothing but the result and one number
per query is kept for it. Forward-mode differentiation needs the plain kernel.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from .attention import Mask

_LOWEST = float(jnp.finfo(jnp.float32).min)


def blockwise_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: "Mask",
    block: int = 512,
) -> Float[Array, "B T N D"]:
    """Softmax attention that holds the scores of `block` queries and `block` keys at a time.

    Neither length has to be a multiple of `block`. The result and the softmax's normaliser carry
    the checkpoint name `"context"`: saving it spares the backward pass this whole function.
    """
    (B, T, N, D), (S, K) = q.shape, k.shape[1:3]
    bq, bk = min(block, T), min(block, S)
    grouped = _pad(q, bq).reshape(B, -1, K, N // K, D)
    out = _flash((T, S, bq, bk), grouped, _pad(k, bk), _pad(v, bk), mask)
    return out[:, :T].reshape(q.shape)


def _pad(x: Float[Array, "B L ..."], block: int) -> Float[Array, "B P ..."]:
    width = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, width)] + [(0, 0)] * (x.ndim - 2)) if width else x


def _cut(x: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: Array, piece: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, piece.astype(x.dtype), start, axis=1)


def _key_blocks(sizes: tuple[int, ...], mask: "Mask", start: Array) -> tuple[Array, Array]:
    """The range of key blocks that some query of the block at `start` may see."""
    _, S, bq, bk = sizes
    first_query = start + mask.q_offset
    stop = jnp.minimum((first_query + bq - 1) // bk + 1, -(-S // bk))
    if mask.window is None:
        return jnp.zeros_like(stop), stop
    return jnp.maximum((first_query - mask.window + 1) // bk, 0), stop


def _scores(
    sizes: tuple[int, ...], mask: "Mask", q: Array, k: Array, start: Array, j: Array
) -> tuple[Array, Array]:
    """Scores [B,K,G,q,k] in float32 of a block of queries and a block of keys, and who sees whom."""
    _, S, bq, bk = sizes
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32)
    seen = mask.block(start + jnp.arange(bq), j * bk + jnp.arange(bk), S)
    return scores, seen[:, None, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(sizes: tuple[int, ...], q: Array, k: Array, v: Array, mask: "Mask") -> Array:
    return _forward(sizes, q, k, v, mask)[0]


def _forward(
    sizes: tuple[int, ...], q: Array, k: Array, v: Array, mask: "Mask"
) -> tuple[Float[Array, "B P K G D"], Float[Array, "B K G P"]]:
    *_, bq, bk = sizes
    B, P, K, G, D = q.shape

    def per_query_block(i: Array) -> tuple[Array, Array]:
        start = i * bq
        queries = _cut(q, start, bq)

        def per_key_block(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            total, top, norm = state
            scores, seen = _scores(sizes, mask, queries, _cut(k, j * bk, bk), start, j)
            new_top = jnp.maximum(top, jnp.where(seen, scores, _LOWEST).max(-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
            shrink = jnp.exp(top - new_top)
            values = jnp.einsum(
                "bkgqs,bskd->bkgqd",
                weights.astype(v.dtype),
                _cut(v, j * bk, bk),
                preferred_element_type=jnp.float32,
            )
            norm = norm * shrink + weights.sum(-1)
            return total * shrink[..., None] + values, new_top, norm

        rows = jnp.zeros((B, K, G, bq), jnp.float32)
        state = (jnp.zeros((B, K, G, bq, D), jnp.float32), rows + _LOWEST, rows)
        first, stop = _key_blocks(sizes, mask, start)
        total, top, norm = jax.lax.fori_loop(first, stop, per_key_block, state)
        norm = jnp.where(norm == 0, 1, norm)  # a query that sees nothing gets zeros
        out = jnp.einsum("bkgqd->bqkgd", total / norm[..., None]).astype(q.dtype)
        return out, jnp.where(top == _LOWEST, 0, top + jnp.log(norm))

    out, lse = jax.lax.map(per_query_block, jnp.arange(P // bq))
    out = jnp.moveaxis(out, 0, 1).reshape(q.shape)
    return out, jnp.moveaxis(lse, 0, 3).reshape(B, K, G, P)


def _flash_fwd(
    sizes: tuple[int, ...], q: Array, k: Array, v: Array, mask: "Mask"
) -> tuple[Array, tuple[Any, ...]]:
    out, lse = _forward(sizes, q, k, v, mask)
    out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
    return out, (q, k, v, mask, out, lse)


def _flash_bwd(
    sizes: tuple[int, ...], residuals: tuple[Any, ...], g: Array
) -> tuple[Array, Array, Array, None]:
    *_, bq, bk = sizes
    q, k, v, mask, out, lse = residuals
    # sum_s p_ts dp_ts, once per query
    delta = jnp.einsum("bqkgd,bqkgd->bkgq", out, g, preferred_element_type=jnp.float32)
    f32 = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def per_query_block(i: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
        start = i * bq
        dq, dk, dv = grads
        queries, g_i = _cut(q, start, bq), _cut(g, start, bq)
        lse_i, delta_i = (jax.lax.dynamic_slice_in_dim(x, start, bq, 3) for x in (lse, delta))

        def per_key_block(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            dq_i, dk, dv = state
            keys, values = _cut(k, j * bk, bk), _cut(v, j * bk, bk)
            scores, seen = _scores(sizes, mask, queries, keys, start, j)
            weights = jnp.where(seen, jnp.exp(scores - lse_i[..., None]), 0)
            d_weights = f32("bqkgd,bskd->bkgqs", g_i, values)
            d_scores = (weights * (d_weights - delta_i[..., None])).astype(q.dtype)
            dv_j = f32("bkgqs,bqkgd->bskd", weights.astype(v.dtype), g_i)
            dk_j = f32("bkgqs,bqkgd->bskd", d_scores, queries)
            dk = _put(dk, _cut(dk, j * bk, bk) + dk_j, j * bk)
            dv = _put(dv, _cut(dv, j * bk, bk) + dv_j, j * bk)
            return dq_i + f32("bkgqs,bskd->bqkgd", d_scores, keys), dk, dv

        state = (jnp.zeros(queries.shape, jnp.float32), dk, dv)
        first, stop = _key_blocks(sizes, mask, start)
        dq_i, dk, dv = jax.lax.fori_loop(first, stop, per_key_block, state)
        return _put(dq, dq_i, start), dk, dv

    # Keys and values are summed over many blocks, so in float32; a block of queries is written once.
    grads = (jnp.zeros_like(q), *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)))
    dq, dk, dv = jax.lax.fori_loop(0, q.shape[1] // bq, per_query_block, grads)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_flash.defvjp(_flash_fwd, _flash_bwd)
