"""The benchmarks' prefetching stack computes what the plain loop does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.prefetch import DISTANCES, prefetched


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("isolation", ["loop", "barrier"])
def test_gradients_are_the_plain_loops(isolation: str, distance: int) -> None:
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w)

    weights = [jax.random.normal(key, (4, 4)) for key in jax.random.split(jax.random.key(0), 5)]
    x = jax.random.normal(jax.random.key(1), (3, 4))

    def plain(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(w, x)
        return jnp.sum(jnp.sin(x))

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(prefetched(layer, isolation, distance)(weights, x)))

    both = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (plain, run))
    want, got = (jax.tree.leaves(fn(weights, x)) for fn in both)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
