# %% [markdown]
# # Decorate your own layer
#
# A layer is any function from arrays to arrays. One decorator checkpoints it and keeps XLA from mixing
# it with its neighbours.

# %%
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer, compare_reports, memory_report


def mlp(weights: dict[str, jax.Array], x: jax.Array, *, activation: str = "gelu") -> jax.Array:
    act = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}[activation]
    return x + act(x @ weights["up"]) @ weights["down"]


layer = checkpointed_layer(mlp)

# %% [markdown]
# The weights are an ordinary list, one dictionary for each layer; the layers need not have the same
# shapes. `activation` is a string, so it is static.


# %%
def init(key: jax.Array, width: int, hidden: int) -> dict[str, jax.Array]:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (width, hidden)) / width**0.5,
        "down": jax.random.normal(down, (hidden, width)) / hidden**0.5,
    }


hidden_sizes = [64, 64, 128, 64, 64, 128]  # every third layer is wider
keys = jax.random.split(jax.random.key(0), len(hidden_sizes))
weights = [init(k, 32, h) for k, h in zip(keys, hidden_sizes, strict=True)]
x = jax.random.normal(jax.random.key(1), (8, 16, 32))


def loss(layer: Any, weights: list[Any], x: jax.Array) -> jax.Array:
    for i, w in enumerate(weights):
        x = layer(w, x, activation="silu" if i % 3 == 2 else "gelu")
    return jnp.mean(x**2)


# %% [markdown]
# Values and gradients are those of the undecorated function.

# %%
plain = jax.jit(jax.value_and_grad(ft.partial(loss, mlp)))(weights, x)
ours = jax.jit(jax.value_and_grad(ft.partial(loss, layer)))(weights, x)
difference = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), plain, ours)
print("largest difference:", max(jax.tree.leaves(difference)))
assert max(jax.tree.leaves(difference)) < 1e-5

# %% [markdown]
# What a training step needs is read from the compiled program; nothing runs, so the arrays can be as
# large as you like.

# %%
big = jax.eval_shape(lambda: [init(jax.random.key(0), 256, 1024) for _ in range(12)])
tokens = jax.ShapeDtypeStruct((8, 1024, 256), jnp.float32)
ways = {
    "no remat": mlp,
    "jax.checkpoint": jax.checkpoint(mlp),
    "loop": checkpointed_layer(mlp, isolation="loop"),
    "barrier": checkpointed_layer(mlp, isolation="barrier"),
}


def train_step(layer: Any, weights: list[Any], x: jax.Array) -> list[Any]:
    def loss(weights: list[Any]) -> jax.Array:
        h = x
        for w in weights:
            h = layer(w, h)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


reports = {
    name: memory_report(ft.partial(train_step, way), big, tokens, target="cpu", donate_argnums=0)
    for name, way in ways.items()
}
print(compare_reports(reports))
