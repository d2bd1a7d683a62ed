"""The decoder that `remat-scan demo` trains: a stack of unlike layers, each behind a boundary.

Read it as an example. What remat_scan needs from a model is one line, in `Decoder.__call__`:
`checkpointed_layer(layer)(x, kv)` where a plain model has `layer(x, kv)`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

KV: TypeAlias = tuple[Array, Array]
Wrap: TypeAlias = Callable[[Any], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """One layer of the stack.

    **Attributes:**

    - `window`: how many positions a token sees, itself included; `None` is all before it.
    - `hidden`: the width of the MLP.
    - `kv`: whether keys and values are the layer's own, are given to later layers too, or come from
      the layer that last gave its own.
    """

    window: int | None
    hidden: int
    kv: Literal["own", "donated", "shared"] = "own"


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder and what it is fed; `batch` sequences of `length` bytes on each device."""

    width: int
    heads: int
    head_dim: int
    layers: tuple[LayerSize, ...]
    batch: int
    length: int
    dtype: Any = jnp.float32  # of the activations; the weights are float32
    sharding: jax.sharding.NamedSharding | None = None  # of the activations


def normal(key: Array, *shape: int, fan_in: int) -> Array:
    return jax.random.normal(key, shape) / math.sqrt(fan_in)


def rms_norm(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    h = x.astype(jnp.float32)
    return (h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotate(x: Float[Array, "... T K"]) -> Float[Array, "... T K"]:
    """Rotary positions (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B T K"],
    value: Float[Array, "B T K"],
    window: int | None,
) -> Float[Array, "B H T K"]:
    """Causal attention, all heads to one head of keys and values.

    Queries and keys are normalised, which bounds the scores by sqrt(K): exp can't overflow, and the
    softmax does without a maximum.
    """
    T, K = query.shape[-2:]
    scores = jnp.einsum("bhtk,bsk->bhts", query, key).astype(jnp.float32) / math.sqrt(K)
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    weights = jnp.exp(scores) * ((distance >= 0) & (distance < (window or T)))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("bhts,bsk->bhtk", weights.astype(value.dtype), value)


class Layer(eqx.Module):
    """Attention and a gated MLP, each with a norm before it and a residual around it."""

    attention_norm: Float[Array, " D"]
    query: Float[Array, "D H K"]
    key_value: Float[Array, "D 2 K"] | None  # one head that all query heads read
    out: Float[Array, "H K D"]
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "D F"]
    up: Float[Array, "D F"]
    down: Float[Array, "F D"]
    size: LayerSize = eqx.field(static=True)

    def __init__(self, size: Size, layer: LayerSize, *, key: Array) -> None:
        D, H, K, F = size.width, size.heads, size.head_dim, layer.hidden
        keys = jax.random.split(key, 6)
        self.size = layer
        self.attention_norm, self.mlp_norm = jnp.ones(D), jnp.ones(D)
        self.query = normal(keys[0], D, H, K, fan_in=D)
        self.key_value = None if layer.kv == "shared" else normal(keys[1], D, 2, K, fan_in=D)
        self.out = normal(keys[2], H, K, D, fan_in=H * K)
        self.gate = normal(keys[3], D, F, fan_in=D)
        self.up = normal(keys[4], D, F, fan_in=D)
        self.down = normal(keys[5], F, D, fan_in=F)

    def __call__(self, x: Float[Array, "B T D"], kv: KV | None) -> tuple[Array, KV | None]:
        """The residual stream, and this layer's keys and values if it gives them to others.

        They are made in here, inside the checkpoint: a layer that computes them outside keeps what
        they are made of.
        """
        h = rms_norm(x) * self.attention_norm.astype(x.dtype)
        if self.key_value is not None:
            key, value = jnp.einsum("btd,dck->cbtk", h, self.key_value.astype(h.dtype))
            kv = rotate(rms_norm(key)), value
        assert kv is not None
        query = rotate(rms_norm(jnp.einsum("btd,dhk->bhtk", h, self.query.astype(h.dtype))))
        context = attend(query, *kv, self.size.window)
        x = x + jnp.einsum("bhtk,hkd->btd", context, self.out.astype(h.dtype))
        h = rms_norm(x) * self.mlp_norm.astype(x.dtype)
        gate, up = h @ self.gate.astype(h.dtype), h @ self.up.astype(h.dtype)
        x = x + (jax.nn.gelu(gate) * up) @ self.down.astype(h.dtype)
        return x, kv if self.size.kv == "donated" else None


class Decoder(eqx.Module):
    """Bytes in, logits of the next byte out."""

    embedding: Float[Array, "256 D"]
    layers: tuple[Layer, ...]
    norm: Float[Array, " D"]
    size: Size = eqx.field(static=True)

    def __init__(self, size: Size, *, key: Array) -> None:
        keys = jax.random.split(key, len(size.layers) + 1)
        self.embedding = normal(keys[0], 256, size.width, fan_in=size.width)
        self.layers = tuple(
            Layer(size, s, key=k) for s, k in zip(size.layers, keys[1:], strict=True)
        )
        self.norm = jnp.ones(size.width)
        self.size = size

    def __call__(self, text: Integer[Array, "B T"], wrap: Wrap) -> Float[Array, "B T 256"]:
        """`wrap` is `checkpointed_layer`, or what it is compared with."""
        x = self.embedding[text].astype(self.size.dtype) * math.sqrt(self.embedding.shape[1])
        if self.size.sharding is not None:
            x = jax.lax.with_sharding_constraint(x, self.size.sharding)
        donated = None
        for layer in self.layers:
            x, kv = wrap(layer)(x, donated if layer.size.kv == "shared" else None)
            donated = donated if kv is None else kv
        x = rms_norm(x) * self.norm.astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, self.embedding.astype(x.dtype)).astype(jnp.float32)


def loss_in_bits(model: Decoder, text: Integer[Array, "B S"], wrap: Wrap) -> Float[Array, ""]:
    """Cross entropy of the next byte, in bits per byte."""
    log_probabilities = jax.nn.log_softmax(model(text[:, :-1], wrap))
    picked = jnp.take_along_axis(log_probabilities, text[:, 1:, None].astype(jnp.int32), axis=-1)
    return -jnp.mean(picked) / math.log(2)


class Adam(NamedTuple):
    """Kingma & Ba, 2014 (https://arxiv.org/abs/1412.6980), with a short linear warm-up."""

    step: Int[Array, ""]
    mean: Decoder
    square: Decoder

    @classmethod
    def init(cls, model: Decoder) -> "Adam":
        # Two trees of zeros: a buffer can't be donated twice.
        mean, square = (jax.tree.map(jnp.zeros_like, model) for _ in range(2))
        return cls(jnp.zeros((), jnp.int32), mean, square)

    def update(self, model: Decoder, gradients: Decoder) -> tuple[Decoder, "Adam"]:
        b1, b2, step = 0.9, 0.98, self.step + 1
        rate = 3e-3 * jnp.minimum(step / 20, 1.0) * jnp.sqrt(1 - b2**step) / (1 - b1**step)
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, self.mean, gradients)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, self.square, gradients)
        model = jax.tree.map(
            lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), model, mean, square
        )
        return model, Adam(step, mean, square)


def make_step(wrap: Wrap) -> Callable[..., Any]:
    """One step of training, `(model, adam, text) -> (model, adam, loss)`; it reuses the state."""

    def step(model: Decoder, adam: Adam, text: Array) -> tuple[Decoder, Adam, Array]:
        loss, gradients = jax.value_and_grad(loss_in_bits)(model, text, wrap)
        return *adam.update(model, gradients), loss

    return jax.jit(step, donate_argnums=(0, 1))
