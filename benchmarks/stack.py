"""The stack that the benchmarks compile: alike layers, fully sharded, one training step."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from remat_scan import Policy, checkpointed_layer

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": ft.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

INPUT_ON_HOST = Policy(offload=("decoder_layer_input",))

WAYS: dict[str, Callable[[Any], Any]] = {
    "no remat": lambda layer: layer,
    "jax.checkpoint": jax.checkpoint,
    "loop": checkpointed_layer(isolation="loop"),
    "barrier": checkpointed_layer(isolation="barrier"),
    "both": checkpointed_layer(isolation="both"),
    "loop, input on host": checkpointed_layer(isolation="loop", policy=INPUT_ON_HOST),
    "barrier, input on host": checkpointed_layer(isolation="barrier", policy=INPUT_ON_HOST),
}


@dataclasses.dataclass(frozen=True)
class Stack:
    """`layers` gated MLPs with RMSNorm and a residual; `batch` x `length` tokens on each device."""

    layers: int
    width: int = 2048
    hidden: int = 8192
    batch: int = 8
    length: int = 8192
    activation: str = "gelu"
    devices: int = 8  # fully sharded over them, along the width, as in MaxText

    def step(self, way: str) -> Callable[..., Any]:
        """Loss, gradients and SGD: `(weights, x) -> weights`."""
        layer = WAYS[way](ft.partial(gated_mlp, ACTIVATIONS[self.activation]))

        def run(weights: Any, x: jax.Array) -> jax.Array:
            for w in weights:
                x = layer(w, x)
            return x

        return sgd_step(run)

    def program(self, way: str) -> tuple[Callable[..., Any], Any, Any]:
        """`(step, weights, x)` with bfloat16 activations and float32 weights, for any target."""
        D, F = self.width, self.hidden
        weights = [
            {
                "gate": self._array((D, F), "float32", ("fsdp", None)),
                "up": self._array((D, F), "float32", ("fsdp", None)),
                "down": self._array((F, D), "float32", (None, "fsdp")),
            }
            for _ in range(self.layers)
        ]
        x = self._array((self.batch * self.devices, self.length, D), "bfloat16", ("fsdp",))
        return jax.jit(self.step(way), donate_argnums=0), weights, x

    def _array(self, shape: tuple[int, ...], dtype: str, spec: tuple[str | None, ...]) -> Any:
        if self.devices == 1:
            return jax.ShapeDtypeStruct(shape, dtype)
        mesh = AbstractMesh((self.devices,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def sgd_step(run: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """Loss, gradients and SGD of a stack: `(weights, x) -> weights`."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(run(weights, x).astype(jnp.float32) ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def gated_mlp(activation: Callable[[jax.Array], jax.Array], w: Any, x: jax.Array) -> jax.Array:
    h = rms_norm(x)
    gate, up, down = (w[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return x + (activation(h @ gate) * (h @ up)) @ down


def rms_norm(x: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    return (h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


# case -> target -> what is compiled
ISOLATION: dict[str, dict[str, Stack]] = {
    "FSDP over 8": {"h100:8": Stack(16), "tpu7x:2x2x1": Stack(12)},
    "FSDP over 8, SiLU": {"h100:8": Stack(16, 1536, 6144, length=4096, activation="silu")},
    "FSDP over 8, GELU, smaller": {"h100:8": Stack(16, 1536, 6144, length=4096)},
    "one device": {
        "h100": Stack(35, batch=8, length=24576, devices=1, width=1536, hidden=6144),
        "tpu7x:2x2x1": Stack(35, batch=8, length=24576, devices=1, width=1536, hidden=6144),
    },
}
