"""The Gemma-4 small text decoder (E2B, E4B) in Equinox.

The formulas are those of `Gemma4ForCausalLM` in Hugging Face transformers 5.24, whose numbers the
tests compare with; where an idea was published, its docstring names the paper.
"""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from remat_scan import checkpointed_layer

from .attention import Kernel, Mask
from .config import Config
from .layers import KV, Embedding, Layer, Linear, RMSNorm, Tokens


class Gemma4(eqx.Module):
    """Token ids to logits.

    `model(ids)` is the whole forward pass; `hidden` stops before the vocabulary, for a loss that
    never holds all logits. `embed`, `per_layer_inputs` and `head` are the pieces around the layers.
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
    ) -> Tokens:
        """The stream after the last norm.

        **Arguments:**

        - `valid`: `False` for padding, on whichever side.
        - `positions`: for RoPE; `0, 1, 2, ...` in every row by default.
        - `segments`: packed documents, an id per token; tokens see their own document only.
        - `dtype`: what to compute in; the embedding table's by default.
        - `policy`, `isolation`: for `remat_scan.checkpointed_layer`, around each layer. A list of
            policies gives each layer its own.
        - `kernel`: see `attention`.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        mask = Mask(valid=valid, segments=segments)
        h = self.embed(ids, dtype)
        ple = self.per_layer_inputs(ids, h)
        given: dict[int, KV] = {}
        for i, (layer, keep) in enumerate(zip(self.layers, self._policies(policy), strict=True)):
            run = checkpointed_layer(layer, policy=keep, isolation=isolation)
            donor = self.config.donor(i)
            shared = None if donor is None else given[donor]
            h, kv = run(h, ple[:, :, i], shared, positions, mask, kernel=kernel)
            if kv is not None:
                given[i] = kv
        return self.norm(h)

    def embed(self, ids: Int[Array, "B T"], dtype: DTypeLike | None = None) -> Tokens:
        """The scaled token embeddings, where the stream starts."""
        dtype = jnp.dtype(self.embed_tokens.weight.dtype if dtype is None else dtype)
        return self.embed_tokens(ids, self.config.hidden_size**0.5, dtype)

    def per_layer_inputs(self, ids: Int[Array, "B T"], h: Tokens) -> Float[Array, "B T L P"]:
        """What each layer adds of its own: a lookup by id plus a projection of the embeddings.

        Per-layer embeddings come from Gemma 3n. With `E` the second table, `W` the projection and
        `h` the scaled embeddings: `(norm(W h / sqrt(d)) + sqrt(P) E[ids]) / sqrt(2)`, cut into one
        slice of size P for each layer.
        """
        P = self.config.hidden_size_per_layer_input
        shape = (*ids.shape, self.config.num_layers, P)
        lookup = self.embed_tokens_per_layer(ids, P**0.5, h.dtype).reshape(shape)
        context = self.per_layer_model_projection(h) * self.config.hidden_size**-0.5
        context = self.per_layer_projection_norm(context.reshape(shape))
        return (context + lookup) * 2**-0.5

    def head(self, h: Float[Array, "*n d"]) -> Float[Array, "*n V"]:
        """Logits of a normed stream, softcapped, in float32. The head is the embedding table (Press
        & Wolf, arXiv:1608.05859), without the embeddings' scale."""
        table = self.embed_tokens.weight.astype(h.dtype)
        logits = jnp.einsum("...d,vd->...v", h, table, preferred_element_type=jnp.float32)
        return softcap(logits, self.config.final_logit_softcapping)

    def _policies(self, policy: Any) -> Sequence[Any]:
        if not isinstance(policy, list | tuple):
            return [policy] * len(self.layers)
        if len(policy) != len(self.layers):
            raise ValueError(f"{len(policy)} policies for {len(self.layers)} layers")
        return policy


def softcap(logits: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """Keeps logits between `-cap` and `cap` (Gemma 2, arXiv:2408.00118)."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
