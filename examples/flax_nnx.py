# %% [markdown]
# # A Flax NNX module
#
# An NNX module changes its own state when it is called: random streams count on, BatchNorm updates its
# statistics. A checkpointed layer is a function, so the state goes in and comes out. The adapter below
# is all that is needed; it works inside `nnx.jit`, `nnx.grad` and `nnx.value_and_grad`.
#
# A module without such state can be wrapped directly, `checkpointed_layer(block)(x)`. Don't do that
# with one that has any: its updates are lost, and a dropout would use the same mask in every step.

# %%
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from remat_scan import checkpointed_layer


@checkpointed_layer
def _run(graphdef: Any, state: Any, *args: Any) -> tuple[Any, Any]:
    module = nnx.merge(graphdef, state)
    out = module(*args)
    return out, nnx.state(module)


def checkpointed(module: nnx.Module, *args: Any) -> Any:
    """`module(*args)`, checkpointed and isolated, with its state updated."""
    graphdef, state = nnx.split(module)
    out, new_state = _run(graphdef, state, *args)
    nnx.update(module, new_state)
    return out


# %% [markdown]
# Two kinds of block, with dropout and batch statistics:


# %%
class Block(nnx.Module):
    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norm(x)))))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(16, hidden, rngs=rngs) for hidden in (32, 64, 32)])

    def __call__(self, x: jax.Array, call: Any) -> jax.Array:
        for block in self.blocks:
            x = call(block, x)
        return x


def loss(model: Model, x: jax.Array, call: Any) -> jax.Array:
    return jnp.mean((model(x, call) - jnp.roll(x, 1, -1)) ** 2)


# %% [markdown]
# Loss, gradients, statistics and random streams are those of the plain model, step after step.


# %%
def train(model: Model, x: jax.Array, call: Any) -> list[float]:
    @nnx.jit
    def step(model: Model, x: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x, call)
        parameters = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients))
        return value

    return [float(step(model, x)) for _ in range(5)]


def plain(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


x = jax.random.normal(jax.random.key(1), (32, 16))
ours, expected = Model(rngs=nnx.Rngs(0)), Model(rngs=nnx.Rngs(0))
losses = train(ours, x, checkpointed)
losses_plain = train(expected, x, plain)
print("losses:", " ".join(f"{value:.4f}" for value in losses))
assert jnp.allclose(jnp.array(losses), jnp.array(losses_plain), rtol=1e-4)
for kind in (nnx.Param, nnx.BatchStat, nnx.RngCount):
    for a, b in zip(
        jax.tree.leaves(nnx.state(ours, kind)),
        jax.tree.leaves(nnx.state(expected, kind)),
        strict=True,
    ):
        assert jnp.allclose(a, b, rtol=1e-3, atol=1e-5), kind
assert int(jax.tree.leaves(nnx.state(ours, nnx.RngCount))[0]) > 0
