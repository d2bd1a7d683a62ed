# %% [markdown]
# # An RNN, an ODE: one step, many times
#
# Here the steps *are* alike and share their weights: a `Stacked` step without weights of its own, which
# `run_stack` runs as one loop. Each step is checkpointed, so the loop keeps the state before each. With
# a nested schedule it keeps fewer: `Nested()` makes segments of about the square root of the number of
# steps, and keeps the state before each segment, and those inside a segment only while the backward
# pass is in it.

# %%
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from remat_scan import Nested, Stacked, compare_reports, memory_report, run_stack

STEPS = 64


def field(weights: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    return jnp.tanh(y @ weights["in"]) @ weights["out"]


def rk4(y: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    dt = 1.0 / STEPS
    a = field(weights, y)
    b = field(weights, y + dt / 2 * a)
    c = field(weights, y + dt / 2 * b)
    d = field(weights, y + dt * c)
    return y + dt / 6 * (a + 2 * b + 2 * c + d)


def plain(weights: Any, y: jax.Array) -> jax.Array:
    y, _ = jax.lax.scan(lambda y, _: (rk4(y, weights), None), y, length=STEPS)
    return y


def each_step(weights: Any, y: jax.Array) -> jax.Array:
    return run_stack([Stacked((rk4,), STEPS)], y, weights).x


def nested(weights: Any, y: jax.Array) -> jax.Array:
    return run_stack([Stacked((rk4,), STEPS)], y, weights, schedule=Nested()).x


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
for solve in (each_step, nested):
    found = jax.jit(jax.grad(ft.partial(loss, solve)))(weights, y)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)

# %% [markdown]
# Temporaries shrink from all stages of all steps, to one state a step, to the 15 that the schedule
# promises to keep.

# %%
batch = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
reports = {
    solve.__name__: memory_report(jax.grad(ft.partial(loss, solve)), weights, batch, target="cpu")
    for solve in (plain, each_step, nested)
}
print(compare_reports(reports))
sizes = [r.temporaries or 0 for r in reports.values()]
assert sizes == sorted(sizes, reverse=True)
assert Nested().kept(STEPS) == 15
