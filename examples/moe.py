# %% [markdown]
# # A mixture of experts with an auxiliary loss
#
# A layer may return anything beside the activations: here the load-balancing loss of its router and the
# number of tokens that each expert got, an integer array without a gradient. A PRNG key goes in, for
# the router's noise; recomputation draws the same noise again.

# %%
from typing import Any

import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer

WIDTH, HIDDEN, EXPERTS = 16, 32, 4


def moe_layer(
    w: dict[str, jax.Array], x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = x @ w["router"]  # [tokens, experts]
    if key is not None:
        logits = logits + 0.1 * jax.random.normal(key, logits.shape)
    probabilities = jax.nn.softmax(logits)
    gate, chosen = jax.lax.top_k(probabilities, 2)
    share = jax.nn.one_hot(chosen, EXPERTS)  # [tokens, 2, experts]
    weight = jnp.einsum("tk,tke->te", gate / gate.sum(-1, keepdims=True), share)
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", x, w["up"]))
    out = jnp.einsum("te,tef,efd->td", weight, hidden, w["down"])
    counts = jnp.sum(share, (0, 1)).astype(jnp.int32)
    balance = EXPERTS * jnp.sum(counts / counts.sum() * probabilities.mean(0))
    return x + out, {"balance": balance, "counts": counts}


def init(key: jax.Array) -> dict[str, jax.Array]:
    r, u, d = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(r, (WIDTH, EXPERTS)) / WIDTH**0.5,
        "up": jax.random.normal(u, (EXPERTS, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(d, (EXPERTS, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def loss(layer: Any, weights: list[Any], x: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    counts, balance = [], jnp.zeros(())
    for w, k in zip(weights, jax.random.split(key, len(weights)), strict=True):
        x, auxiliary = layer(w, x, k)
        balance += auxiliary["balance"]
        counts.append(auxiliary["counts"])
    return jnp.mean(x**2) + 0.01 * balance, jnp.stack(counts)


# %%
weights = [init(k) for k in jax.random.split(jax.random.key(0), 4)]
x = jax.random.normal(jax.random.key(1), (64, WIDTH))
noise = jax.random.key(2)


def run(layer: Any) -> Any:
    value_and_grad = jax.value_and_grad(lambda w: loss(layer, w, x, noise), has_aux=True)
    return jax.jit(value_and_grad)(weights)


(value, counts), gradients = run(checkpointed_layer(moe_layer))
(plain_value, plain_counts), plain_gradients = run(moe_layer)
print(f"loss {value:.4f}, tokens of each expert, layer by layer:\n{counts}")
assert (counts == plain_counts).all()
assert jnp.allclose(value, plain_value, rtol=1e-5)
for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
    assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)
