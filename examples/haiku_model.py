# %% [markdown]
# # A Haiku model
#
# `hk.transform_with_state` turns a layer into two pure functions; its `apply` is a layer as it is.
# Inside a larger transformed function the adapter below lifts the parameters and the state of one
# layer into the outer ones, so that their names and their tree stay as they are.

# %%
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer


def checkpointed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A Haiku function or module, checkpointed and isolated, for use inside `hk.transform`."""
    pure = hk.transform_with_state(fn)
    apply = checkpointed_layer(pure.apply)

    def call(*args: Any) -> Any:
        init, updater = hk.transparent_lift_with_state(pure.init, allow_reuse=True)
        key = hk.maybe_next_rng_key()
        params, state = init(key, *args)
        out, state = apply(params, state, key, *args)
        updater.update(state)
        return out

    return call


# %%
class Block(hk.Module):
    def __init__(self, hidden: int, name: str | None = None):
        super().__init__(name=name)
        self.hidden = hidden

    def __call__(self, x: jax.Array) -> jax.Array:
        h = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        h = jax.nn.gelu(hk.Linear(self.hidden)(h))
        return x + hk.Linear(x.shape[-1])(h)


def model(wrap: Callable[..., Any]) -> Any:
    @hk.transform_with_state
    def forward(x: jax.Array) -> jax.Array:
        for i, hidden in enumerate((32, 64, 32)):
            x = wrap(Block(hidden, name=f"block{i}"))(x)
        return x

    return forward


# %%
x = jax.random.normal(jax.random.key(1), (32, 16))
ours, plain = model(checkpointed), model(lambda block: block)
params, state = plain.init(jax.random.key(0), x)
our_params, _ = ours.init(jax.random.key(0), x)
assert jax.tree.structure(params) == jax.tree.structure(our_params)


def loss(forward: Any, params: Any, state: Any) -> tuple[jax.Array, Any]:
    y, state = forward.apply(params, state, None, x)
    return jnp.mean((y - jnp.roll(x, 1, -1)) ** 2), state


def run(forward: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda params: loss(forward, params, state), has_aux=True))(
        params
    )


found, expected = run(ours), run(plain)  # ((loss, new state), gradients)
for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(a, b, rtol=1e-3, atol=1e-5)
print(f"loss {found[0][0]:.4f}; loss, statistics and gradients are those of the plain model")
