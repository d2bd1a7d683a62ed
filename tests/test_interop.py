"""Frameworks and tools around layers; modules with state are in the examples, which test themselves."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from remat_scan import checkpointed_layer


def mlp(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(layer, weights, x):
    for w in weights:
        x = layer(w, x)
    return jnp.mean(x**2)


@pytest.fixture
def weights():
    return [
        {"up": jax.random.normal(k, (4, h)) / 2, "down": jax.random.normal(k, (h, 4)) / 2}
        for k, h in zip(jax.random.split(jax.random.key(0), 3), (8, 16, 8), strict=True)
    ]


X = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
ISOLATIONS = ("loop", "barrier", "both")


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_optax_trains_as_with_the_plain_layer(weights, isolation):
    optax = pytest.importorskip("optax")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def train(layer):
        @jax.jit
        def step(weights, state):
            gradients = jax.grad(lambda w: loss(layer, w, X))(weights)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

        trained, state = weights, optimizer.init(weights)
        for _ in range(3):
            trained, state = step(trained, state)
        return trained

    close(train(checkpointed_layer(mlp, isolation=isolation)), train(mlp), 1e-4)


def test_orbax_restores_a_wrapped_equinox_module_into_the_plain_one(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    import equinox as eqx

    block = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    saved = jax.tree.leaves(eqx.filter(checkpointed_layer(block), eqx.is_array))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", saved)
        checkpointer.wait_until_finished()
        target = jax.tree.map(jnp.zeros_like, eqx.filter(block, eqx.is_array))
        restored = checkpointer.restore(tmp_path / "weights", jax.tree.leaves(target))
    close(restored, jax.tree.leaves(eqx.filter(block, eqx.is_array)), 0)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_training_step_survives_export_and_serialisation(weights, isolation):
    pytest.importorskip("flatbuffers")
    layer = checkpointed_layer(mlp, isolation=isolation)
    gradients = jax.jit(jax.grad(lambda w, x: loss(layer, w, x)))
    exported = jax.export.export(gradients)(weights, X)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(weights, X), jax.grad(lambda w: loss(mlp, w, X))(weights))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_profiles_can_name_the_layer(weights, isolation):
    """A profiler shows `op_name` of the compiled operations."""
    layer = checkpointed_layer(mlp, isolation=isolation)
    compiled = jax.jit(jax.grad(lambda w: loss(layer, w, X))).lower(weights).compile()
    dots = [line for line in compiled.as_text().splitlines() if "dot_general" in line]
    named = [line for line in dots if "mlp" in line]
    assert named
    assert any("transpose" in line for line in named)


def test_nnx_state_is_lost_without_the_adapter_and_kept_with_it():
    """The documentation says so; if flax changes this, the warning there can go."""
    nnx = pytest.importorskip("flax.nnx")
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x = jnp.ones((64,))
    wrapped = checkpointed_layer(dropout)
    assert (wrapped(x) == wrapped(x)).all()
    plain = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert (plain(x) != plain(x)).any()
    from examples.flax_nnx import checkpointed

    adapted, plain = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    for _ in range(3):
        close(checkpointed(adapted, x), plain(x))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_linen_apply_with_mutable_collections(isolation):
    nn = pytest.importorskip("flax.linen")
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)

    def apply(variables, x):
        return norm.apply(variables, x, mutable=["batch_stats"])

    close(checkpointed_layer(apply, isolation=isolation)(variables, X), apply(variables, X))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_haiku_apply_is_a_layer(isolation):
    hk = pytest.importorskip("haiku")
    pure = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.3, hk.Linear(4)(x)))
    params, key = pure.init(jax.random.key(0), X), jax.random.key(1)
    layer = checkpointed_layer(pure.apply, isolation=isolation)
    found = jax.grad(lambda p: layer(p, key, X).sum())(params)
    close(found, jax.grad(lambda p: pure.apply(p, key, X).sum())(params))
