"""The parts of the decoder. Field names are those of the checkpoint's keys.

Every part computes in the dtype of the activations it is given: weights are cast where they are
used, so float32 master weights and bfloat16 compute need no second copy of the model, and the casts
lie inside each layer's checkpoint boundary.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .attention import Kernel, Mask, attention
from .config import FULL, Config

Tokens = Float[Array, "B T d"]


class KV(NamedTuple):
    """Finished keys (normed and rotated) and values (normed) of one layer."""

    k: Float[Array, "B S K D"]
    v: Float[Array, "B S K D"]


class Linear(eqx.Module):
    """A matrix without bias, stored [out, in] as in the checkpoint."""

    weight: Float[Array, "out in"]

    def __init__(self, size_in: int, size_out: int, key: PRNGKeyArray):
        self.weight = jax.random.normal(key, (size_out, size_in)) * size_in**-0.5

    def __call__(self, x: Float[Array, "*n in"]) -> Float[Array, "*n out"]:
        return jnp.einsum("...i,oi->...o", x, self.weight.astype(x.dtype))


class Embedding(eqx.Module):
    weight: Float[Array, "V d"]

    def __init__(self, vocab: int, size: int, key: PRNGKeyArray):
        self.weight = jax.random.normal(key, (vocab, size)) * size**-0.5

    def __call__(
        self, ids: Int[Array, "B T"], scale: float, dtype: jnp.dtype
    ) -> Float[Array, "B T d"]:
        """The rows of `ids` times `scale`, which is rounded to `dtype` first."""
        return self.weight[ids].astype(dtype) * jnp.asarray(scale, dtype)


class RMSNorm(eqx.Module):
    """`x / rms(x) * weight`, in float32 throughout; without a weight it only normalises.

    Zhang & Sennrich, arXiv:1910.07467. `rms(x)` is `sqrt(mean(x**2) + eps)`; unlike in earlier
    Gemmas the scale is the weight itself, not one plus it.
    """

    weight: Float[Array, " d"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, size: int | None, eps: float):
        self.weight = None if size is None else jnp.ones(size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y if self.weight is None else y * self.weight.astype(jnp.float32)).astype(x.dtype)


def rope(
    x: Float[Array, "B T N D"], positions: Int[Array, "B T"], theta: float, rotary_factor: float
) -> Float[Array, "B T N D"]:
    """Rotates the pairs `(j, j + D/2)` by `position * theta**(-2j/D)`, in split-half order.

    Su et al., arXiv:2104.09864. Only the first `rotary_factor` of the pairs turn; the others keep
    still. The exponent's denominator is `D` whatever the factor: transformers' "proportional" RoPE.
    """
    D = x.shape[-1]
    turning = int(rotary_factor * D // 2)
    frequency = theta ** (-jnp.arange(turning, dtype=jnp.float32) * 2 / D)
    frequency = jnp.pad(frequency, (0, D // 2 - turning))
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@jax.custom_jvp
def gelu(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Tanh-GELU (Hendrycks & Gimpel, arXiv:1606.08415) computed in float32 and rounded once. For the
    backward pass it keeps one array, its derivative, in the dtype of `x`."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    x = primals[0].astype(jnp.float32)
    y, slope = jax.jvp(lambda x: jax.nn.gelu(x, approximate=True), (x,), (jnp.ones_like(x),))
    dtype = primals[0].dtype
    return y.astype(dtype), tangents[0] * slope.astype(dtype)


class SelfAttention(eqx.Module):
    """Projections and norms around attention. A reader of another layer's K/V has no k and v.

    Queries and keys are normed per head before RoPE (after Henry et al., arXiv:2010.04245), and
    values too, without a weight. Fewer heads of keys than of queries: Ainslie et al.,
    arXiv:2305.13245. Sharing between layers: Brandon et al., arXiv:2405.12981.
    """

    q_proj: Linear
    k_proj: Linear | None
    v_proj: Linear | None
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm | None
    v_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    rope_theta: float = eqx.field(static=True)
    rotary_factor: float = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, key: PRNGKeyArray):
        kq, kk, kv, ko = jax.random.split(key, 4)
        d, D, eps = config.hidden_size, config.layer_head_dim(layer), config.rms_norm_eps
        full, reader = config.layer_types[layer] == FULL, config.donor(layer) is not None
        self.q_proj = Linear(d, config.num_attention_heads * D, kq)
        self.k_proj = None if reader else Linear(d, config.num_key_value_heads * D, kk)
        self.v_proj = None if reader else Linear(d, config.num_key_value_heads * D, kv)
        self.o_proj = Linear(config.num_attention_heads * D, d, ko)
        self.q_norm = RMSNorm(D, eps)
        self.k_norm = None if reader else RMSNorm(D, eps)
        self.v_norm = RMSNorm(None, eps)
        self.head_dim = D
        self.window = None if full else config.sliding_window
        self.rope_theta = config.global_rope_theta if full else config.rope_theta
        self.rotary_factor = config.partial_rotary_factor if full else 1.0

    # The names are on the projections' raw results: with one saved, its matmul is not run again;
    # norm and RoPE are, and cost little.

    def queries(self, x: Tokens, positions: Int[Array, "B T"]) -> Float[Array, "B T N D"]:
        q = self._heads(checkpoint_name(self.q_proj(x), "query_proj"))
        return self._rope(self.q_norm(q), positions)

    def keys_values(self, x: Tokens, positions: Int[Array, "B T"]) -> KV:
        assert self.k_proj is not None
        assert self.v_proj is not None
        assert self.k_norm is not None
        k = self._heads(checkpoint_name(self.k_proj(x), "key_proj"))
        v = self._heads(checkpoint_name(self.v_proj(x), "value_proj"))
        return KV(self._rope(self.k_norm(k), positions), self.v_norm(v))

    def mix(self, q: Float[Array, "B T N D"], kv: KV, mask: Mask, kernel: Kernel) -> Tokens:
        """Attends and projects back to the stream's size."""
        context = attention(q, kv.k, kv.v, mask, kernel)
        return checkpoint_name(self.o_proj(context.reshape(*q.shape[:2], -1)), "out_proj")

    def _heads(self, x: Float[Array, "B T ND"]) -> Float[Array, "B T N D"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _rope(self, x: Float[Array, "B T N D"], p: Int[Array, "B T"]) -> Float[Array, "B T N D"]:
        return rope(x, p, self.rope_theta, self.rotary_factor)


class MLP(eqx.Module):
    """`down(gelu(gate(x)) * up(x))`, the GEGLU of Shazeer, arXiv:2002.05202."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(self, size: int, hidden: int, key: PRNGKeyArray):
        kg, ku, kd = jax.random.split(key, 3)
        self.gate_proj = Linear(size, hidden, kg)
        self.up_proj = Linear(size, hidden, ku)
        self.down_proj = Linear(hidden, size, kd)

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        gate = checkpoint_name(self.gate_proj(x), "mlpwi_0")
        up = checkpoint_name(self.up_proj(x), "mlpwi_1")
        return checkpoint_name(self.down_proj(gelu(gate) * up), "mlpwo")


class Layer(eqx.Module):
    """One decoder layer, its keys and values included.

    A layer that makes keys and values hands them out as a second result; a reader gets those of its
    donor. They cross the layer's checkpoint boundary as plain inputs and outputs, so they are kept for
    the backward pass once, at the donor, and gradients flow from all readers back into it.

    With `norm` for five norms, each of its own weight, and `ple` this layer's slice of the per-layer
    embeddings:

    ```python
    h = h + norm(attention(norm(h)))
    h = h + norm(mlp(norm(h)))
    h = h + norm(projection(gelu(gate(h)) * ple))
    h = h * scalar
    ```
    """

    self_attn: SelfAttention
    mlp: MLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm
    per_layer_input_gate: Linear
    per_layer_projection: Linear
    post_per_layer_input_norm: RMSNorm
    layer_scalar: Float[Array, "1"]

    def __init__(self, config: Config, layer: int, key: PRNGKeyArray):
        ka, km, kg, kp = jax.random.split(key, 4)
        d, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        self.self_attn = SelfAttention(config, layer, ka)
        self.mlp = MLP(d, config.layer_intermediate_size(layer), km)
        self.input_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.pre_feedforward_layernorm = RMSNorm(d, eps)
        self.post_feedforward_layernorm = RMSNorm(d, eps)
        self.per_layer_input_gate = Linear(d, P, kg)
        self.per_layer_projection = Linear(P, d, kp)
        self.post_per_layer_input_norm = RMSNorm(d, eps)
        self.layer_scalar = jnp.ones(1)

    @property
    def reads(self) -> bool:
        """Whether it attends to another layer's keys and values."""
        return self.self_attn.k_proj is None

    def __call__(
        self,
        h: Tokens,
        ple: Float[Array, "B T P"],
        positions: Int[Array, "B T"],
        mask: Mask,
        kernel: Kernel = "auto",
        *,
        shared: KV | None = None,
    ) -> Tokens | tuple[Tokens, KV]:
        """**Arguments:**

        - `h`, `ple`: the stream and this layer's slice of the per-layer embeddings.
        - `positions`: for RoPE.
        - `mask`: padding and segments; the layer adds its own window.
        - `shared`: for a reader, its donor's keys and values.

        **Returns:** the stream and, if it is no reader, this layer's keys and values.
        """
        h = checkpoint_name(h, "decoder_layer_input")
        out, kv = self.attend(h, shared, positions, mask, kernel)
        h = self.tail(h, out, ple)
        return h if self.reads else (h, kv)

    def attend(
        self,
        h: Tokens,
        shared: KV | None,
        positions: Int[Array, "B T"],
        mask: Mask,
        kernel: Kernel,
    ) -> tuple[Tokens, KV]:
        """The half of the layer that mixes tokens. Returns its result and the K/V it used."""
        x = self.input_layernorm(h)
        q = self.self_attn.queries(x, positions)
        kv = self.self_attn.keys_values(x, positions) if shared is None else shared
        return self.self_attn.mix(q, kv, self.own_mask(mask), kernel), kv

    def own_mask(self, mask: Mask) -> Mask:
        return Mask(self.self_attn.window, mask.q_offset, mask.valid, mask.segments)

    def tail(
        self, h: Float[Array, "*n d"], attended: Float[Array, "*n d"], ple: Float[Array, "*n P"]
    ) -> Float[Array, "*n d"]:
        """The half that treats each token alone, so it may run in blocks of tokens."""
        h = h + self.post_attention_layernorm(attended)
        m = self.mlp(self.pre_feedforward_layernorm(h))
        h = h + self.post_feedforward_layernorm(m)
        g = gelu(self.per_layer_input_gate(h)) * ple  # on the stream itself, not normed
        h = h + self.post_per_layer_input_norm(self.per_layer_projection(g))
        return h * self.layer_scalar.astype(h.dtype)  # last: it scales the residual too
