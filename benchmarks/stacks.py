"""Ways to run the benchmarks' stack with `run_stack`, for `python -m benchmarks stacks`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec

from remat_scan import Nested, Stacked, blockwise, run_stack

from .stack import ACTIVATIONS, INPUT_ON_HOST, Stack, gated_mlp, sgd_step


class Block(eqx.Module):
    """One gated MLP; in blocks of so many of its sequences' tokens if `size` is given."""

    w: dict[str, jax.Array]
    activation: str = eqx.field(static=True)
    size: int | None = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        def mlp(w: Any, x: jax.Array) -> jax.Array:
            return gated_mlp(ACTIVATIONS[self.activation], w, x)

        if self.size is not None:
            mlp = blockwise(mlp, axis=(None, 1), size=self.size, out=1)
        return mlp(self.w, x)


@dataclasses.dataclass(frozen=True)
class Way:
    """Options of `run_stack`, and how the layers are stored."""

    options: dict[str, Any]
    period: int | None = None  # stacked, with a period of so many layers
    block: int | None = None  # tokens of each sequence in a block of `blockwise`


_BARRIER = {"isolation": "barrier"}
_HOST = {"policy": INPUT_ON_HOST}

WAYS: dict[str, Way] = {
    "loop": Way({}),
    "barrier": Way(_BARRIER),
    "overlap 1": Way({**_BARRIER, "overlap": 1}),
    "overlap 2": Way({**_BARRIER, "overlap": 2}),
    "periods": Way({}, period=1),
    "periods of 4": Way(_BARRIER, period=4),
    "2 levels, loop": Way({"schedule": Nested()}),
    "2 levels, barrier": Way({**_BARRIER, "schedule": Nested()}),
    "2 levels, periods": Way({"schedule": Nested()}, period=1),
    "3 levels, barrier": Way({**_BARRIER, "schedule": Nested(levels=3)}),
    "3 levels, periods": Way({"schedule": Nested(levels=3)}, period=1),
    "6 states, barrier": Way({**_BARRIER, "schedule": Nested(states=6)}),
    "input on host, loop": Way(_HOST),
    "input on host, barrier": Way({**_HOST, **_BARRIER}),
    "input on host, periods": Way(_HOST, period=1),
    "blockwise, loop": Way({}, block=1024),
    "blockwise, barrier": Way(_BARRIER, block=1024),
}


def program(stack: Stack, way: str) -> tuple[Callable[..., Any], Any, Any]:
    """`(step, layers, x)`: loss, gradients and SGD; the step takes over the layers' memory."""
    how = WAYS[way]
    _, weights, x = stack.program("no remat")
    layers: list[Any] = [Block(w, stack.activation, how.block) for w in weights]
    if how.period is not None:
        repeats = stack.layers // how.period
        layers = [Stacked([_repeated(b, repeats) for b in layers[: how.period]], repeats)]

    step = sgd_step(lambda layers, x: run_stack(layers, x, **how.options).x)
    return jax.jit(step, donate_argnums=0), layers, x


def _repeated(block: Block, repeats: int) -> Block:
    def one(w: Any) -> jax.ShapeDtypeStruct:
        sharding = w.sharding
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jax.ShapeDtypeStruct((repeats, *w.shape), w.dtype, sharding=sharding)

    return jax.tree.map(one, block)
