"""Attention with one mask and several kernels that agree on it.

`attention(q, k, v, mask, kernel=...)` is the only entry. Scores are `q @ k` times 1.0, as in
transformers' Gemma 4: the norms on queries and keys stand in for the usual `1/sqrt(head_dim)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .blockwise import blockwise_attention

Query: TypeAlias = Float[Array, "B T N D"]
Key: TypeAlias = Float[Array, "B S K D"]


class Mask(eqx.Module):
    """Which keys each query sees. Query `t` has the sequence index `t + q_offset`.

    A query at index `q` sees the key at index `k` iff `0 <= q - k` (and `< window`, if given), the
    key is valid, and both are in one segment. A query that sees nothing gets zeros.

    **Arguments:**

    - `window`: keys in view, the query's own included; `None` for all earlier ones.
    - `q_offset`: the sequence index of the first query; may be traced (cached decoding).
    - `valid`: `False` for padding keys.
    - `segments`: an id per token (packed documents); each run of equal ids is a segment. Needs as
        many queries as keys.
    """

    window: int | None = eqx.field(static=True, default=None)
    q_offset: int | Int[Array, ""] = 0
    valid: Bool[Array, "B S"] | None = None
    segments: Int[Array, "B S"] | None = None

    def block(self, q: Int[Array, " Q"], k: Int[Array, " J"], length: int) -> Bool[Array, "#B Q J"]:
        """Visibility of the keys at `k` (out of `length`) to the queries numbered `q`."""
        distance = q[:, None] + self.q_offset - k
        seen = (distance >= 0) & (k < length)
        if self.window is not None:
            seen &= distance < self.window
        seen = seen[None]
        at = jnp.minimum(k, length - 1)
        if self.valid is not None:
            seen = seen & self.valid[:, None, at]
        if self.segments is not None:
            own = self.segments[:, jnp.minimum(q, length - 1)]
            seen = seen & (own[:, :, None] == self.segments[:, None, at])
        return seen

    def any_seen(self, T: int, S: int) -> Bool[Array, "#B T"] | None:
        """Which queries see a key at all; `None` if every one does. Linear in the length."""
        if self.valid is None and T == S and _is_zero(self.q_offset):
            return None
        k = jnp.arange(S)
        valid = jnp.ones((1, S), bool) if self.valid is None else self.valid
        last = jax.lax.cummax(jnp.where(valid, k, -1), axis=1)  # latest valid key up to k
        q = jnp.arange(T) + self.q_offset
        first = jnp.zeros_like(q) if self.window is None else jnp.maximum(q - self.window + 1, 0)
        if self.segments is not None:
            starts = jnp.diff(self.segments, axis=1, prepend=self.segments[:, :1] - 1) != 0
            first = jnp.maximum(first, jax.lax.cummax(jnp.where(starts, k, 0), axis=1))
        return jnp.take(last, jnp.clip(q, 0, S - 1), axis=1) >= jnp.maximum(first, 0)


Kernel: TypeAlias = str | Callable[[Query, Key, Key, Mask], Query]


def attention(q: Query, k: Key, v: Key, mask: Mask, kernel: Kernel = "auto") -> Query:
    """Softmax attention; query head `n` reads key head `n // (N // K)`.

    **Arguments:**

    - `kernel`: `"plain"` (any device, memory `T * S`), `"blockwise"` (any device, memory linear in
        the length forward and backward), `"splash"` (TPU), `"cudnn"` (NVIDIA, half precision, head
        size up to 128, from Hopper on 256; memory `T * S` where padding or segments are given; the
        256 and partitioning over devices ask the devices themselves, so ahead of time it compiles
        for head sizes up to 128, on a mesh of simulated devices, not on an abstract one),
        `"auto"`: the best of these for the shapes and for the backend JAX runs on *now*, so name
        one when you compile for another. Or any function with the signature of a kernel, such as
        `Sharded`.

    **Returns:** as `q`. The result carries the checkpoint name `"context"`.
    """
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not match")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads do not divide among {k.shape[2]} key heads")
    if mask.segments is not None and (q.shape[1] != k.shape[1] or not _is_zero(mask.q_offset)):
        raise ValueError("segments need the same tokens as queries and as keys, without an offset")
    if mask.segments is not None:
        mask = eqx.tree_at(lambda m: m.segments, mask, _runs(mask.segments))
    if callable(kernel):
        return kernel(q, k, v, mask)
    if kernel not in (*KERNELS, "auto"):
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, auto, got {kernel!r}")
    return KERNELS[_best(q, k, mask) if kernel == "auto" else kernel](q, k, v, mask)


@dataclass(frozen=True)
class Sharded:
    """A kernel run on each device's own batch rows and heads, under `jax.shard_map`.

    Splash attention and cuDNN are opaque to XLA's partitioner, so on a mesh they need this.

    **Arguments:**

    - `mesh`, `batch`: the mesh and the axes over which the batch is split.
    - `heads`: the axis over which query heads are split, if any. Key heads are split with them
        where they divide, and repeated first where they do not.
    """

    kernel: str
    mesh: Mesh | AbstractMesh
    batch: str | tuple[str, ...] | None
    heads: str | None = None

    def __call__(self, q: Query, k: Key, v: Key, mask: Mask) -> Query:
        if self.kernel == "cudnn" and isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                "cuDNN attention cannot be lowered on an abstract mesh: JAX partitions it with the "
                "devices at hand. Give a mesh of simulated CPU devices, or kernel='blockwise'"
            )
        size = 1 if self.heads is None else self.mesh.shape[self.heads]
        if k.shape[2] % size and k.shape[2] > 1:
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        heads = PartitionSpec(self.batch, None, self.heads)
        shared = heads if k.shape[2] % size == 0 else PartitionSpec(self.batch)
        arrays, static = eqx.partition(mask, eqx.is_array)  # an offset of 0 has to stay a number
        per_row = jax.tree.map(lambda x: PartitionSpec(*(self.batch,) * min(x.ndim, 1)), arrays)
        return jax.shard_map(
            lambda q, k, v, m: attention(q, k, v, eqx.combine(m, static), self.kernel),
            mesh=self.mesh,
            in_specs=(heads, shared, shared, per_row),
            out_specs=heads,
            check_vma=False,
        )(q, k, v, arrays)


def _is_zero(offset: int | Array) -> bool:
    return isinstance(offset, int) and offset == 0


def _best(q: Query, k: Key, mask: Mask) -> str:
    T, S, D = q.shape[1], k.shape[1], q.shape[3]
    backend = jax.default_backend()
    whole = T == S and _is_zero(mask.q_offset)
    if whole and backend == "tpu" and D % 128 == 0 and T >= 128:
        return "splash"
    unpadded = whole and mask.valid is None and mask.segments is None
    if unpadded and backend == "gpu" and not _cudnn_refuses(q):
        return "cudnn"
    return "plain" if T * S <= 512 * 1024 else "blockwise"


def _plain(q: Query, k: Key, v: Key, mask: Mask) -> Query:
    B, T, N, D = q.shape
    S, K = k.shape[1], k.shape[2]
    seen = mask.block(jnp.arange(T), jnp.arange(S), S)[:, None, None]
    scores = jnp.einsum(
        "btkgd,bskd->bkgts",
        q.reshape(B, T, K, N // K, D),
        k,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)
    return checkpoint_name(out, "context")


def _blockwise(q: Query, k: Key, v: Key, mask: Mask) -> Query:
    return blockwise_attention(q, k, v, mask)


def _splash(q: Query, k: Key, v: Key, mask: Mask, *, interpret: bool = False) -> Query:
    # Imported late: it needs Pallas, which is slow to import and of no use elsewhere.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (B, T, N, D), (S, _K) = q.shape, k.shape[1:3]
    if T != S or not _is_zero(mask.q_offset) or D % 128:
        raise ValueError(
            "splash attention needs as many queries as keys, no offset and a head size divisible "
            f"by 128, got {T} queries, {S} keys, offset {mask.q_offset}, head size {D}; "
            "use kernel='blockwise'"
        )
    block = min(512, -(-T // 128) * 128)
    length = -(-T // block) * block
    ids = jnp.ones((B, T), jnp.int32) if mask.segments is None else mask.segments
    q_ids, k_ids = ids, ids if mask.valid is None else jnp.where(mask.valid, ids, -1)
    rows = [(0, 0), (0, length - T)]
    segments = splash.SegmentIds(jnp.pad(q_ids, rows), jnp.pad(k_ids, rows, constant_values=-2))
    rows = [*rows, (0, 0), (0, 0)]
    q, k, v = (jnp.swapaxes(jnp.pad(x, rows), 1, 2) for x in (q, k, v))
    if mask.window is None:
        one = splash.CausalMask((length, length))
    else:
        one = splash.LocalMask((length, length), (mask.window - 1, 0), 0)
    run = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one] * N),
        block_sizes=splash.BlockSizes(
            block,
            block,
            block,
            block,
            block,
            block,
            block,
            block,  # forward, then backward
        ),
        residual_checkpoint_name="context",
        interpret=interpret,
    )
    out: Any = jax.vmap(run)(q, k, v, segments)
    out = jnp.swapaxes(out, 1, 2)[:, :T]
    # The kernel averages the values where a query sees no key.
    any_seen = mask.any_seen(T, S)
    return out if any_seen is None else jnp.where(any_seen[..., None, None], out, 0)


def _runs(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The segments numbered 1, 2, ...: an id that comes again is another segment's."""
    return jnp.cumsum(jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0, axis=1)


def _cudnn_refuses(q: Query) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"bfloat16 or float16, got {q.dtype}"
    # JAX asks the GPU that it runs on, so what is compiled elsewhere has the older ones' limit.
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    most = 256 if int(str(capability).split(".")[0]) >= 9 else 128
    if q.shape[3] > most or q.shape[3] % 8:
        return f"a head size up to {most} that 8 divides (256 on Hopper or later), got {q.shape[3]}"
    return None


def _cudnn(q: Query, k: Key, v: Key, mask: Mask) -> Query:
    T, S = q.shape[1], k.shape[1]
    if reason := _cudnn_refuses(q):
        raise ValueError(f"cuDNN attention needs {reason}; use kernel='blockwise'")
    if T != S or not _is_zero(mask.q_offset):
        raise ValueError(
            f"cuDNN attention needs as many queries as keys and no offset, got {T} and {S}; "
            "use kernel='blockwise'"
        )
    run = partial(jax.nn.dot_product_attention, scale=1.0, implementation="cudnn")
    # The backward pass refuses odd lengths. What is added is last, so no query before it sees it.
    q, k, v = (jnp.pad(x, [(0, 0), (0, T % 2), (0, 0), (0, 0)]) for x in (q, k, v))
    if mask.valid is None and mask.segments is None:
        window = None if mask.window is None else (mask.window - 1, 0)
        out = run(q, k, v, is_causal=True, local_window_size=window)
    else:
        at = jnp.arange(q.shape[1])
        seen = jnp.broadcast_to(mask.block(at, at, T), (q.shape[0], at.size, at.size))
        out = jnp.where(seen.any(-1)[..., None, None], run(q, k, v, mask=seen[:, None]), 0)
    return checkpoint_name(out[:, :T], "context")


KERNELS = {"plain": _plain, "blockwise": _blockwise, "splash": _splash, "cudnn": _cudnn}
