# %% [markdown]
# # An Equinox transformer
#
# Blocks are `equinox.Module`s in a tuple. Wrapping happens where a block is called, so the model stays
# the pytree that it was: optimisers, checkpoints and `eqx.tree_at` see no difference.

# %%
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from remat_scan import checkpointed_layer


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    norm2: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    window: int | None = eqx.field(static=True)  # None: all earlier tokens

    def __init__(self, width: int, hidden: int, window: int | None, *, key: jax.Array):
        a, u, d = jax.random.split(key, 3)
        self.norm1 = eqx.nn.RMSNorm(width)
        self.norm2 = eqx.nn.RMSNorm(width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
        self.up = eqx.nn.Linear(width, hidden, key=u)
        self.down = eqx.nn.Linear(hidden, width, key=d)
        self.window = window

    def __call__(self, x: jax.Array) -> jax.Array:  # [length, width]
        at = jnp.arange(x.shape[0])
        mask = at[:, None] >= at
        if self.window is not None:
            mask &= at[:, None] - at < self.window
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask)
        h = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: tuple[Block, ...]
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array):
        e, h, *bs = jax.random.split(key, 6)
        self.embedding = eqx.nn.Embedding(16, 32, key=e)
        sizes = [(64, 4), (64, 4), (128, None), (64, 4)]  # not alike: nothing could be stacked
        self.blocks = tuple(Block(32, s, w, key=k) for (s, w), k in zip(sizes, bs, strict=True))
        self.head = eqx.nn.Linear(32, 16, key=h)

    def __call__(self, tokens: jax.Array, wrap: Callable[[Any], Any]) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = wrap(block)(x)
        return jax.vmap(self.head)(x)


# %% [markdown]
# The task: repeat a sequence with period 5. `wrap` is the only thing that changes between the plain
# and the checkpointed model.


# %%
def loss(model: Model, tokens: jax.Array, wrap: Callable[[Any], Any]) -> jax.Array:
    logits = jax.vmap(lambda t: model(t, wrap))(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batch(key: jax.Array) -> jax.Array:
    return jnp.tile(jax.random.randint(key, (8, 5), 0, 16), (1, 4))


model = Model(key=jax.random.key(0))
tokens = batch(jax.random.key(1))
value, grad = eqx.filter_value_and_grad(loss)(model, tokens, checkpointed_layer)
value_plain, grad_plain = eqx.filter_value_and_grad(loss)(model, tokens, lambda block: block)
assert eqx.tree_equal((value, grad), (value_plain, grad_plain), rtol=1e-4, atol=1e-5)

# %% [markdown]
# Training is as always.

# %%
optimizer = optax.adam(3e-3)


@eqx.filter_jit
def step(model: Model, state: Any, tokens: jax.Array) -> tuple[Model, Any, jax.Array]:
    value, grad = eqx.filter_value_and_grad(loss)(model, tokens, checkpointed_layer)
    updates, state = optimizer.update(grad, state)
    return eqx.apply_updates(model, updates), state, value


state = optimizer.init(eqx.filter(model, eqx.is_array))
losses = []
for key in jax.random.split(jax.random.key(2), 30):
    model, state, value = step(model, state, batch(key))
    losses.append(float(value))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < 0.95 * losses[0]
