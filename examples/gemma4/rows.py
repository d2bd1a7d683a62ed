"""Layers of a large batch: a few of its rows at a time, each layer's own input made where it is used.

With many tokens on a device two things outgrow the stream: one layer's working set (an MLP 12,288
wide), and the per-layer inputs of all layers together, which are as large as six streams. Here
a layer makes its own input inside its checkpoint boundary and runs block by block, so neither
exists as a whole, forward or backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from remat_scan import blockwise

from .attention import Kernel, Mask
from .layers import KV, Embedding, Layer, Linear, RMSNorm, Tokens


class PerLayerInput(eqx.Module):
    """What layers add of their own: a lookup by id plus a projection of the embeddings.

    Per-layer embeddings come from Gemma 3n. With `E` the second table, `W` the projection and
    `h` the scaled embeddings: `(norm(W h / sqrt(d)) + sqrt(P) E[ids]) / sqrt(2)`, cut into one
    slice of size P for each of the `L` layers that the table and the projection have columns for.
    """

    embed_tokens_per_layer: Embedding
    per_layer_model_projection: Linear

    def __call__(self, ids: Int[Array, "B T"], h: Tokens, norm: RMSNorm) -> Float[Array, "B T L P"]:
        assert norm.weight is not None
        (P,), d = norm.weight.shape, h.shape[-1]
        shape = (*ids.shape, -1, P)
        lookup = self.embed_tokens_per_layer(ids, P**0.5, h.dtype).reshape(shape)
        context = norm((self.per_layer_model_projection(h) * d**-0.5).reshape(shape))
        return (context + lookup) * 2**-0.5

    def each(self, count: int) -> list["PerLayerInput"]:
        """The same for one layer at a time."""
        tables = jnp.split(self.embed_tokens_per_layer.weight, count, axis=1)
        projections = jnp.split(self.per_layer_model_projection.weight, count, axis=0)
        return [
            eqx.tree_at(lambda own: jax.tree.leaves(own), self, parts)
            for parts in zip(tables, projections, strict=True)
        ]


class OwnLayer(eqx.Module):
    """A layer and what it needs to make its own input."""

    layer: Layer
    own: PerLayerInput


@dataclass(frozen=True)
class Rows:
    """How many rows of the batch a layer runs at a time.

    **Attributes:**

    - `size`: rows of all devices together; `None` for all rows at once.
    - `shards`: how many devices the rows are split over.
    - `gather`: given a layer and a dtype, the layer with its matrices in that dtype and wherever its
        rows are, so that this is done once and not for each block.
    """

    size: int | None = None
    shards: int = 1
    gather: Callable[[Layer, DTypeLike], Layer] | None = None


class InRows(eqx.Module):
    """A layer that makes its own input, a block of rows at a time."""

    layer: Layer
    own: PerLayerInput
    rows: Rows = eqx.field(static=True)

    def __call__(
        self,
        h: Tokens,
        norm: RMSNorm,
        ids: Int[Array, "B T"],
        embedded: Tokens,
        positions: Int[Array, "B T"],
        mask: Mask,
        kernel: Kernel = "auto",
        *,
        shared: KV | None = None,
    ) -> Any:
        """As `Layer`, with what `own` needs in place of the layer's own input."""
        layer = self.layer

        def run(weights: Any, h: Tokens, shared: KV | None, *args: Any) -> Any:
            layer, own, norm = weights
            ids, embedded, positions, mask = args
            ple = own(ids, embedded, norm)[:, :, 0]
            return layer(h, ple, positions, mask, kernel, shared=shared)

        if self.rows.size is None:
            weights = (layer, self.own, norm)
            return run(weights, h, shared, ids, embedded, positions, mask)
        if self.rows.gather is not None:
            layer = self.rows.gather(layer, h.dtype)
        blocks = blockwise(
            run, axis=(None, *(0,) * 6), out=0, size=self.rows.size, shards=self.rows.shards
        )
        weights = (layer, self.own, norm)
        return blocks(weights, h, shared, ids, embedded, positions, mask)
