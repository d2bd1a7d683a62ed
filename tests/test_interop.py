"""Frameworks and tools around layers; modules with state are in the examples, which test themselves."""

import re

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


def in_scopes(layer, weights):
    """The loss with each layer in a scope of its own."""
    x = X
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = layer(w, x)
    return jnp.mean(x**2)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_compiled_operations_carry_the_scope_of_their_layer(weights, isolation):
    """A profiler shows `op_name` of the compiled operations: every layer's, forward and backward."""
    layer = checkpointed_layer(mlp, isolation=isolation)
    compiled = jax.jit(jax.grad(lambda w: in_scopes(layer, w))).lower(weights).compile()
    names = re.findall(r'op_name="([^"]*dot_general[^"]*)"', compiled.as_text())
    assert names
    assert all("mlp" in name for name in names), "the layer's own name"
    for i in range(len(weights)):
        mine = [name for name in names if f"block_{i}" in name]
        assert any("transpose(" in name for name in mine), f"backward pass of block_{i}"
    forward = [name for name in names if "transpose(" not in name]
    assert {i for i in range(len(weights)) if any(f"block_{i}" in n for n in forward)} >= {0, 1}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_recorded_profile_names_the_layers(weights, isolation, tmp_path):
    layer = checkpointed_layer(mlp, isolation=isolation)
    step = jax.jit(jax.grad(lambda w: in_scopes(layer, w)))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(step(weights))
    (recorded,) = tmp_path.rglob("*.xplane.pb")
    profile = recorded.read_bytes()
    for i in range(len(weights)):
        assert f"block_{i}".encode() in profile


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
def test_nnx_batch_statistics_and_random_streams_are_those_of_the_plain_module(isolation):
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(self.linear(self.norm(x)))

    @checkpointed_layer(isolation=isolation)
    def run(graphdef, state, x):
        block = nnx.merge(graphdef, state)
        return block(x), nnx.state(block)

    def wrapped(block, x):
        graphdef, state = nnx.split(block)
        out, state = run(graphdef, state, x)
        nnx.update(block, state)
        return jnp.mean(out**2)

    def plain(block, x):
        return jnp.mean(block(x) ** 2)

    ours, expected = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    before = nnx.state(expected, nnx.BatchStat)
    before = jax.tree.map(jnp.copy, before)
    for _ in range(3):
        close(nnx.grad(wrapped)(ours, X), nnx.grad(plain)(expected, X))
    close(nnx.state(ours, nnx.BatchStat), nnx.state(expected, nnx.BatchStat))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, nnx.state(ours, nnx.BatchStat))
    assert all(jax.tree.leaves(moved))
    counts = [int(c) for c in jax.tree.leaves(nnx.state(ours, nnx.RngCount))]
    assert counts == [int(c) for c in jax.tree.leaves(nnx.state(expected, nnx.RngCount))]
    assert max(counts) >= 3


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_linen_apply_with_mutable_collections(isolation):
    nn = pytest.importorskip("flax.linen")
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)

    def apply(variables, x):
        return norm.apply(variables, x, mutable=["batch_stats"])

    layer = checkpointed_layer(apply, isolation=isolation)
    close(layer(variables, X), apply(variables, X))

    def loss(apply, params):
        y, updates = apply({**variables, "params": params}, X)
        return jnp.mean(y**3), updates

    found, expected = (
        jax.grad(lambda p, f=f: loss(f, p), has_aux=True)(variables["params"])
        for f in (layer, apply)
    )
    close(found, expected)  # gradients and the updated statistics


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_haiku_apply_is_a_layer(isolation):
    hk = pytest.importorskip("haiku")
    pure = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.3, hk.Linear(4)(x)))
    params, key = pure.init(jax.random.key(0), X), jax.random.key(1)
    layer = checkpointed_layer(pure.apply, isolation=isolation)
    found = jax.grad(lambda p: layer(p, key, X).sum())(params)
    close(found, jax.grad(lambda p: pure.apply(p, key, X).sum())(params))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_haiku_state_goes_in_and_comes_out(isolation):
    hk = pytest.importorskip("haiku")
    pure = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    params, state = pure.init(jax.random.key(0), X)
    layer = checkpointed_layer(pure.apply, isolation=isolation)

    def loss(apply, params):
        y, new = apply(params, state, None, X)
        return jnp.mean(y**3), new

    found, expected = (
        jax.grad(lambda p, f=f: loss(f, p), has_aux=True)(params) for f in (layer, pure.apply)
    )
    close(found, expected)


def test_orbax_restores_nnx_state_that_was_trained_through_the_adapter(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    ocp = pytest.importorskip("orbax.checkpoint")
    from examples.flax_nnx import Block, checkpointed

    block = Block(4, 8, rngs=nnx.Rngs(0))
    for _ in range(2):
        checkpointed(block, jnp.asarray(X))
    kinds = (nnx.Param, nnx.BatchStat)
    saved = [nnx.to_pure_dict(nnx.state(block, kind)) for kind in kinds]
    fresh = Block(4, 8, rngs=nnx.Rngs(1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "block", saved)
        checkpointer.wait_until_finished()
        targets = [nnx.to_pure_dict(nnx.state(fresh, kind)) for kind in kinds]
        restored = checkpointer.restore(tmp_path / "block", targets)
    close(restored, saved, 0)
    means = [v for path, v in jax.tree_util.tree_leaves_with_path(restored) if "mean" in str(path)]
    assert means
    assert all((m != 0).any() for m in means)
