# %% [markdown]
# # Unlike layers that share keys and values
#
# In some decoders only a few layers compute keys and values, and later ones read theirs. Such a stack
# can't be a `lax.scan` over stacked weights: the layers have different weights and different inputs.
# Here it stays a Python loop, and the shared values are ordinary arguments and results.

# %%
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer

HEADS, HEAD_DIM, WIDTH = 4, 8, 32


class Kind(NamedTuple):
    hidden: int
    donates: str | None = None  # the name under which later layers find its keys and values
    reads: str | None = None


KINDS = [
    Kind(64, donates="local"),
    Kind(64, donates="global"),
    Kind(128, reads="local"),  # a wider MLP, and no key and value weights
    Kind(64, reads="global"),
    Kind(128, reads="local"),
]


def init(kind: Kind, key: jax.Array) -> dict[str, jax.Array]:
    shapes = {
        "query": (WIDTH, HEADS * HEAD_DIM),
        "out": (HEADS * HEAD_DIM, WIDTH),
        "up": (WIDTH, kind.hidden),
        "down": (kind.hidden, WIDTH),
    }
    if kind.reads is None:
        shapes |= {"key": (WIDTH, HEADS * HEAD_DIM), "value": (WIDTH, HEADS * HEAD_DIM)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


# %% [markdown]
# One function for all kinds. `shared` is `None` for a layer that makes its own keys and values: `None`
# is static, so the two cases are traced apart. What the layer returns beside `x` is kept by whoever
# calls it, as any other array.


# %%
def layer(
    w: dict[str, jax.Array], x: jax.Array, shared: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def heads(h: jax.Array) -> jax.Array:
        return h.reshape(*h.shape[:-1], HEADS, HEAD_DIM)

    query = heads(x @ w["query"])
    key, value = shared or (heads(x @ w["key"]), heads(x @ w["value"]))
    context = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + context.reshape((*x.shape[:-1], -1)) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], (key, value)


def stack(layer: Callable[..., Any], weights: list[Any], x: jax.Array) -> jax.Array:
    donated: dict[str, Any] = {}
    for kind, w in zip(KINDS, weights, strict=True):
        x, kv = layer(w, x, donated[kind.reads] if kind.reads else None)
        if kind.donates:
            donated[kind.donates] = kv
    return jnp.mean(x**2)


# %% [markdown]
# The gradient of a donor's key weights gathers what its readers send back, through the boundary of each
# layer.

# %%
keys = jax.random.split(jax.random.key(0), len(KINDS))
weights = [init(kind, k) for kind, k in zip(KINDS, keys, strict=True)]
x = jax.random.normal(jax.random.key(1), (2, 16, WIDTH))
plain = jax.jit(jax.grad(lambda w: stack(layer, w, x)))(weights)
for isolation in ("loop", "barrier"):
    wrapped = checkpointed_layer(layer, isolation=isolation)
    ours = jax.jit(jax.grad(lambda w, f=wrapped: stack(f, w, x)))(weights)
    worst = max(
        float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True)
    )
    print(f"{isolation}: gradients agree to {worst:.0e} (relative)")
    assert worst < 1e-5
