"""Every peer of the benchmarks computes what the plain loop does."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers import PEERS, Decoder, layer

SMALL = Decoder(
    4, width=16, hidden=32, head=8, batch=2, length=16, devices=1, dtype="float32", blocks=4
)


def small_inputs(decoder=SMALL):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    weights = [
        {name: jax.random.normal(next(keys), w.shape) * 0.2 for name, w in one.items()}
        for one in decoder.weights()
    ]
    start = jax.random.normal(next(keys), (decoder.length, decoder.width))
    x = jax.random.normal(next(keys), (decoder.batch, decoder.length, decoder.width))
    return weights, start, x


def plain_loss(parameters, x):
    weights, start = parameters
    x = x + start
    for w in weights:
        x = layer(SMALL, w, x)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def expected():
    weights, start, x = small_inputs()
    return jax.value_and_grad(plain_loss)((weights, start), x)


@pytest.mark.parametrize("way", PEERS)
def test_same_loss_and_gradients_as_the_plain_loop(way, expected):
    package = PEERS[way].needs
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `nox -s benchmarks` has it")
    weights, start, x = small_inputs()
    parameters = SMALL.parameters(way, weights, start)
    value, gradients = jax.jit(jax.value_and_grad(SMALL.loss(way)))(parameters, x)
    expected_value, (by_layer, by_start) = expected
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    expected_gradients = SMALL.parameters(way, by_layer, by_start)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected_gradients)
    for found, wanted in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
