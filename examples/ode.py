# %% [markdown]
# # An RNN, an ODE: one step, many times
#
# Here the steps *are* alike, and `jax.lax.scan` runs them. A `checkpointed_layer` composes with it: the
# scan keeps the state between steps, and each step's inside is recomputed. Taking segments of several
# steps as one layer keeps fewer states: with segments of about the square root of the number of steps,
# both what is kept and what is recomputed at a time are of that size.

# %%
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from remat_scan import checkpointed_layer, compare_reports, memory_report

STEPS = 64


def field(weights: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    return jnp.tanh(y @ weights["in"]) @ weights["out"]


def rk4(weights: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    dt = 1.0 / STEPS
    a = field(weights, y)
    b = field(weights, y + dt / 2 * a)
    c = field(weights, y + dt / 2 * b)
    d = field(weights, y + dt * c)
    return y + dt / 6 * (a + 2 * b + 2 * c + d)


def steps(step: Any, number: int, weights: Any, y: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda y, _: (step(weights, y), None), y, length=number)
    return y


def plain(weights: Any, y: jax.Array) -> jax.Array:
    return steps(rk4, STEPS, weights, y)


def each_step(weights: Any, y: jax.Array) -> jax.Array:
    return steps(checkpointed_layer(rk4), STEPS, weights, y)


def segments(weights: Any, y: jax.Array, size: int = 8) -> jax.Array:
    # A checkpointed segment of checkpointed steps: kept are STEPS / size states, then size states.
    segment = checkpointed_layer(ft.partial(steps, checkpointed_layer(rk4), size))
    return steps(segment, STEPS // size, weights, y)


# %%
k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
weights = {
    "in": jax.random.normal(k1, (16, 64)) / 4,
    "out": jax.random.normal(k2, (64, 16)) / 8,
}
y = jax.random.normal(k3, (32, 16))


def loss(solve: Any, weights: Any, y: jax.Array) -> jax.Array:
    return jnp.mean(solve(weights, y) ** 2)


expected = jax.jit(jax.grad(ft.partial(loss, plain)))(weights, y)
for solve in (each_step, segments):
    found = jax.jit(jax.grad(ft.partial(loss, solve)))(weights, y)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)

# %% [markdown]
# Temporaries shrink from all stages of all steps, to one state a step, to a few states.

# %%
batch = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
reports = {
    solve.__name__: memory_report(jax.grad(ft.partial(loss, solve)), weights, batch, target="cpu")
    for solve in (plain, each_step, segments)
}
print(compare_reports(reports))
sizes = [r.temporaries or 0 for r in reports.values()]
assert sizes == sorted(sizes, reverse=True)
