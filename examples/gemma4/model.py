"""The Gemma-4 small text decoder (E2B, E4B) in Equinox.

The formulas are those of `Gemma4ForCausalLM` in Hugging Face transformers 5.24, whose numbers the
tests compare with; where an idea was published, its docstring names the paper.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from remat_scan import Stacked, StackLayer, run_stack, stack_layers, unstack_layers

from .attention import Kernel, Mask
from .config import Config
from .layers import Embedding, Layer, Linear, RMSNorm, Tokens
from .rows import InRows, OwnLayer, PerLayerInput, Rows


class Gemma4(eqx.Module):
    """Token ids to logits.

    `model(ids)` is the whole forward pass; `hidden` stops before the vocabulary, for a loss that
    never holds all logits. `embed`, `per_layer_inputs` and `head` are the pieces around the layers.
    `in_periods` stacks the layers that repeat, for a program that compiles faster.
    """

    embed_tokens: Embedding
    embed_tokens_per_layer: Embedding
    per_layer_model_projection: Linear
    per_layer_projection_norm: RMSNorm
    layers: tuple[Layer, ...]
    norm: RMSNorm
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Random weights of about unit gain; `eqx.filter_eval_shape(Gemma4, config, key=key)`
        gives the shapes alone."""
        ke, kp, km, kl = jax.random.split(key, 4)
        L, P = config.num_layers, config.hidden_size_per_layer_input
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ke)
        self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, L * P, kp)
        self.per_layer_model_projection = Linear(config.hidden_size, L * P, km)
        self.per_layer_projection_norm = RMSNorm(P, config.rms_norm_eps)
        self.layers = tuple(Layer(config, i, k) for i, k in enumerate(jax.random.split(kl, L)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.config = config

    def __call__(self, ids: Int[Array, "B T"], **options: Any) -> Float[Array, "B T V"]:
        """Logits in float32; takes the options of `hidden`."""
        return self.head(self.hidden(ids, **options))

    def hidden(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dtype: DTypeLike | None = None,
        policy: Any = "full",
        isolation: Literal["loop", "barrier", "both", "none"] = "loop",
        kernel: Kernel = "auto",
        rows: Rows | None = None,
    ) -> Tokens:
        """The stream after the last norm.

        **Arguments:**

        - `valid`: `False` for padding, on whichever side.
        - `positions`: for RoPE; `0, 1, 2, ...` in every row by default.
        - `segments`: packed documents, an id per token; tokens see their own document only.
        - `dtype`: what to compute in; the embedding table's by default.
        - `policy`, `isolation`: for `remat_scan.run_stack`: for all layers, a list with one for each,
            or by patterns on their names, `sliding_attention` and `full_attention`.
        - `kernel`: see `attention`.
        - `rows`: for large batches: how many rows a layer runs at a time.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        h = self.embed(ids, dtype)
        args = (positions, Mask(valid=valid, segments=segments), kernel)
        own = None
        if rows is None and not self._own_inputs:
            own = list(jnp.unstack(self.per_layer_inputs(ids, h), axis=2))
        else:
            args = (self.per_layer_projection_norm, ids, h, *args)
        options = {"policy": policy, "isolation": isolation}
        h = run_stack(self._stack(rows), h, *args, per_layer=own, **options).x
        return self.norm(h)

    def in_periods(self) -> "Gemma4":
        """The same model with repeated layers stacked: of E2B, three times five layers that have
        keys and values and four times five that read them. See `remat_scan.stack_layers`.

        Each layer then holds its own columns of the table and the projection of per-layer inputs, so
        that nothing needs to be cut up, stacked or put together in a step; the model itself has
        neither. It is for training: `hidden` works, `per_layer_inputs` does not. `one_by_one` leads
        back.
        """
        own = self._per_layer_input.each(self.config.num_layers)
        layers = [OwnLayer(layer, part) for layer, part in zip(self.layers, own, strict=True)]
        return eqx.tree_at(
            lambda m: (m.layers, m.embed_tokens_per_layer, m.per_layer_model_projection),
            self,
            (tuple(stack_layers(layers)), None, None),
        )

    def one_by_one(self) -> "Gemma4":
        """What `in_periods` was called on: the layers as a checkpoint has them."""
        layers = unstack_layers(self.layers)
        tables, projections = zip(*(jax.tree.leaves(layer.own) for layer in layers), strict=True)
        whole = (jnp.concatenate(tables, axis=1), jnp.concatenate(projections, axis=0))
        own = eqx.tree_at(lambda own: jax.tree.leaves(own), layers[0].own, whole)
        return eqx.tree_at(
            lambda m: (m.layers, m.embed_tokens_per_layer, m.per_layer_model_projection),
            self,
            (
                tuple(layer.layer for layer in layers),
                own.embed_tokens_per_layer,
                own.per_layer_model_projection,
            ),
            is_leaf=lambda x: x is None,
        )

    @property
    def _own_inputs(self) -> bool:
        return self.embed_tokens_per_layer is None

    def _stack(self, rows: Rows | None) -> list[StackLayer | Stacked]:
        """The layers, and who reads whose keys and values: those of the last layer of the same type
        that made some."""
        stack: list[StackLayer | Stacked] = []
        kinds = iter(self.config.layer_types)
        items: tuple[Any, ...] = self.layers
        if rows is not None and not self._own_inputs:
            own = self._per_layer_input.each(self.config.num_layers)
            items = tuple(OwnLayer(layer, part) for layer, part in zip(items, own, strict=True))

        def declared(item: Any) -> StackLayer:
            layer, fn, kind = item, item, next(kinds)
            if isinstance(item, OwnLayer):
                layer, fn = item.layer, InRows(item.layer, item.own, rows or Rows())
            if layer.reads:
                return StackLayer(fn, reads={"shared": kind}, name=kind)
            return StackLayer(fn, writes=kind, name=kind)

        for item in items:
            if isinstance(item, Stacked):
                stack.append(Stacked([declared(layer) for layer in item.period], item.repeats))
                for _ in range(len(item.period) * (item.repeats - 1)):
                    next(kinds)
            else:
                stack.append(declared(item))
        return stack

    def embed(self, ids: Int[Array, "B T"], dtype: DTypeLike | None = None) -> Tokens:
        """The scaled token embeddings, where the stream starts."""
        dtype = jnp.dtype(self.embed_tokens.weight.dtype if dtype is None else dtype)
        return self.embed_tokens(ids, self.config.hidden_size**0.5, dtype)

    def per_layer_inputs(self, ids: Int[Array, "B T"], h: Tokens) -> Float[Array, "B T L P"]:
        """What each layer adds of its own, given the ids and their scaled embeddings."""
        return self._per_layer_input(ids, h, self.per_layer_projection_norm)

    @property
    def _per_layer_input(self) -> PerLayerInput:
        return PerLayerInput(self.embed_tokens_per_layer, self.per_layer_model_projection)

    def head(self, h: Float[Array, "*n d"]) -> Float[Array, "*n V"]:
        """Logits of a normed stream, softcapped, in float32. The head is the embedding table (Press
        & Wolf, arXiv:1608.05859), without the embeddings' scale."""
        table = self.embed_tokens.weight.astype(h.dtype)
        logits = jnp.einsum("...d,vd->...v", h, table, preferred_element_type=jnp.float32)
        return softcap(logits, self.config.final_logit_softcapping)


def softcap(logits: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """Keeps logits between `-cap` and `cap` (Gemma 2, arXiv:2408.00118)."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
