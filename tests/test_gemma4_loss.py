"""The blockwise loss against optax on all logits at once, and how much it holds."""

import pytest

optax = pytest.importorskip("optax")
pytest.importorskip("safetensors")

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

from examples.gemma4.loss import IGNORE, cross_entropy, next_token_labels

B, T, D, V = 3, 10, 8, 23


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(2 * rng.normal(size=(B, T, D)), dtype)
    table = jnp.asarray(rng.normal(size=(V, D)), dtype)
    labels = rng.integers(0, V, (B, T))
    labels[rng.random((B, T)) < 0.3] = IGNORE
    return hidden, table, jnp.asarray(labels)


def whole(hidden, table, labels, *, cap=None, z_loss=0.0, ignore=IGNORE):
    """optax on all logits."""
    logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    counts = labels != ignore
    each = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(counts, labels, 0)
    )
    each += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(counts, each, 0).sum() / jnp.maximum(counts.sum(), 1)


@pytest.mark.parametrize("block_tokens", [1, 4, 7, 30, 1000])
@pytest.mark.parametrize(("cap", "z_loss"), [(None, 0.0), (2.0, 0.01)])
def test_equals_optax(block_tokens, cap, z_loss):
    hidden, table, labels = arrays()

    def ours(hidden, table):
        return cross_entropy(
            hidden, table, labels, softcap_at=cap, block_tokens=block_tokens, z_loss=z_loss
        ).total

    value, grads = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, table)
    theirs = ft.partial(whole, labels=labels, cap=cap, z_loss=z_loss)
    want, want_grads = jax.jit(jax.value_and_grad(theirs, (0, 1)))(hidden, table)
    # Sums of V products and T * B tokens: each rounding is 6e-8 of the largest number, about ten.
    np.testing.assert_allclose(value, want, rtol=2e-6)
    for got, exact in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6)


def test_parts_add_up():
    hidden, table, labels = arrays()
    with_z = cross_entropy(hidden, table, labels, z_loss=0.1, block_tokens=4)
    np.testing.assert_allclose(with_z.total, with_z.cross_entropy + with_z.z_loss, rtol=1e-6)
    np.testing.assert_allclose(with_z.cross_entropy, whole(hidden, table, labels), rtol=2e-6)
    assert with_z.tokens == (labels != IGNORE).sum()


def test_another_ignore_index():
    hidden, table, labels = arrays()
    labels = jnp.where(labels == IGNORE, 0, labels)
    got = cross_entropy(hidden, table, labels, ignore=0, block_tokens=7)
    np.testing.assert_allclose(got.total, whole(hidden, table, labels, ignore=0), rtol=2e-6)


def test_no_token_counts():
    hidden, table, labels = arrays()
    nothing = jnp.full_like(labels, IGNORE)
    value, grads = jax.value_and_grad(
        lambda h: cross_entropy(h, table, nothing, block_tokens=4, z_loss=0.1).total
    )(hidden)
    assert value == 0
    assert (grads == 0).all()


def test_bfloat16_stream_with_a_float32_table():
    hidden, table, labels = arrays(jnp.bfloat16)
    got = cross_entropy(hidden, table.astype(jnp.float32), labels, block_tokens=4)
    np.testing.assert_allclose(got.total, whole(hidden, table, labels), rtol=2e-6)


def test_a_block_has_a_token():
    with pytest.raises(ValueError, match="block_tokens must be at least 1, got 0"):
        cross_entropy(*arrays(), block_tokens=0)


def temporaries(tokens, block_tokens):
    """Bytes of temporaries beside the blocks of the stream: of loss and gradients, compiled."""
    d, words = 8, 4096
    shapes = (
        jax.ShapeDtypeStruct((2, tokens // 2, d), jnp.float32),
        jax.ShapeDtypeStruct((words, d), jnp.float32),
        jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32),
    )

    def loss(hidden, table, labels):
        return cross_entropy(
            hidden, table, labels, block_tokens=block_tokens, softcap_at=30.0
        ).total

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes - words * d * 4, words * 4


def test_holds_the_logits_of_one_block():
    """A few arrays of one block's logits, whatever the number of tokens; all at once is 16 times."""
    block = 64
    small, word_bytes = temporaries(4 * block, block)
    large, _ = temporaries(32 * block, block)
    assert large < 4 * block * word_bytes
    assert large - small < 0.5 * block * word_bytes  # what grows is the stream, not the logits
    half, _ = temporaries(32 * block, block // 2)
    assert half < 0.6 * large
    everything, _ = temporaries(32 * block, 32 * block)
    assert everything > 8 * large


def test_labels():
    ids = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    valid = jnp.asarray([[True] * 4, [True, True, False, False]])
    segments = jnp.asarray([[0, 0, 9, 9], [1, 1, 1, 1]])
    i = IGNORE
    assert next_token_labels(ids).tolist() == [[2, 3, 4, i], [6, 7, 8, i]]
    assert next_token_labels(ids, valid).tolist() == [[2, 3, 4, i], [6, i, i, i]]
    assert next_token_labels(ids, None, segments).tolist() == [[2, i, 4, i], [6, 7, 8, i]]
    left = jnp.asarray([[True] * 4, [False, False, True, True]])
    assert next_token_labels(ids, left).tolist() == [[2, 3, 4, i], [i, i, 8, i]]
