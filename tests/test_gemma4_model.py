"""The decoder against Hugging Face transformers' numbers, for two small models of random weights."""

import functools as ft
import json

import pytest

pytest.importorskip("safetensors")

import jax
import jax.numpy as jnp
import numpy as np
from gemma4_small import DATA, small
from helpers import ISOLATIONS

from examples.gemma4 import weights
from examples.gemma4.attention import Mask
from examples.gemma4.compare import gradients, intermediates
from examples.gemma4.config import FULL, SLIDING, Config, load_config
from examples.gemma4.layers import gelu, rope
from examples.gemma4.loss import next_token_loss
from examples.gemma4.model import Gemma4
from examples.gemma4.rows import Rows
from remat_scan import POLICY_NAMES, Policy

MODELS = ("tiny_e2b", "tiny_e4b")
# Two float32 programs that sum in other orders: the references differ from float64 by 3e-5.
LOGITS = 5e-5
RELATIVE = 1e-4


@ft.cache
def case(name):
    return weights.load(DATA / name), dict(np.load(DATA / name / "reference.npz"))


@ft.cache
def all_logits(name, **options):
    """Of every batch that the reference has logits for, in one run: they are all of one shape."""
    model, ref = case(name)
    ids = {k: ref[f"{k}.input_ids"] for k in ("padded", "left")}
    ids["batch"] = ref["input_ids"]
    ids["decode"] = np.concatenate([ref["decode.prompt"], ref["decode.tokens"]], axis=1)
    every = np.ones(ref["input_ids"].shape, bool)
    valid = {k: every & (ref.get(f"{k}.attention_mask", 1) == 1) for k in ids}
    stacked, mask = (jnp.asarray(np.concatenate(list(x.values()))) for x in (ids, valid))
    options = {"policy": "none", "isolation": "none", **options}
    got = np.asarray(jax.jit(lambda m: m(stacked, valid=mask, **options))(model))
    return dict(zip(ids, np.split(got, len(ids)), strict=True))


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("kernel", ["plain", "blockwise"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, kernel):
    """A whole batch, and with padding on either side, where only the tokens that count are compared."""
    _, ref = case(name)
    got = all_logits(name, kernel=kernel)
    assert got["batch"].dtype == np.float32
    for key, stem in (("batch", ""), ("padded", "padded."), ("left", "left.")):
        valid = ref.get(f"{stem}attention_mask", np.ones((2, 17), int)) == 1
        want, ours = ref[f"{stem}logits"][valid], got[key][valid]
        np.testing.assert_allclose(ours, want, rtol=0, atol=LOGITS, err_msg=key)
        p, q = log_softmax(want), log_softmax(ours)
        assert (np.exp(p) * (p - q)).sum(-1).mean() <= 1e-8
        assert np.isfinite(got[key]).all()
    # The logits of each step with a cache, from one pass without.
    steps = got["decode"][:, ref["decode.prompt"].shape[1] - 1 :]
    np.testing.assert_allclose(steps, ref["decode.step_logits"], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("name", MODELS)
def test_every_intermediate(name):
    model, ref = case(name)
    got = jax.jit(intermediates)(model, jnp.asarray(ref["input_ids"]))
    stems = ("inputs_embeds", "ple", "final_norm_out", "attn_out", "mlp_out", "layer_out")
    stored = {k for k in ref if k.split(".")[0] in stems}
    assert set(got) == stored
    assert len(stored) == 3 + 3 * len(model.layers)
    for key in stored:
        scale = max(1.0, np.abs(ref[key]).max())
        np.testing.assert_allclose(got[key], ref[key], rtol=0, atol=1e-5 * scale, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient(name):
    model, ref = case(name)
    loss, got = jax.jit(gradients)(model, jnp.asarray(ref["input_ids"]))
    np.testing.assert_allclose(loss, ref["loss"], rtol=1e-6)
    assert set(got) == {k.removeprefix("grad.") for k in ref if k.startswith("grad.")}
    for key, x in got.items():
        want = ref[f"grad.{key}"]
        atol = RELATIVE * np.abs(want).max()
        if key == f"model.layers.{len(model.layers) - 1}.layer_scalar":
            # The last norm undoes it: what is left is rounding, compared as such.
            assert np.abs(want).max() < 1e-4
            atol = 1e-5
        np.testing.assert_allclose(x, want, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_masks(name):
    model, ref = case(name)
    T = ref["input_ids"].shape[1]
    for kind, mask in ((SLIDING, "mask.sliding"), (FULL, "mask.full")):
        layer = model.layers[model.config.layer_types.index(kind)]
        seen = layer.own_mask(Mask()).block(jnp.arange(T), jnp.arange(T), T)[0]
        np.testing.assert_array_equal(seen, ref[mask])


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name):
    """Activations and weights in bfloat16: as near as transformers' own bfloat16 is to float32."""
    model, ref = case(name)
    theirs = np.abs(ref["bf16.logits"] - ref["logits"])

    ids = jnp.asarray(ref["input_ids"])
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    # Weights in bfloat16, or in float32 and rounded where they are used, but for norms.
    for weight, dtype in ((cast, None), (model, jnp.bfloat16))[: 1 + (name == "tiny_e2b")]:
        got = jax.jit(lambda m, dtype=dtype: m(ids, dtype=dtype, policy="none", isolation="none"))(
            weight
        )
        assert got.dtype == jnp.float32
        ours = np.abs(got - ref["logits"])
        assert ours.mean() < 1.5 * theirs.mean()
        assert ours.max() < 2 * theirs.max()


def test_packed_documents_are_as_if_alone():
    """Both in one row of six, or each alone in a row, padded to as long."""
    model, ids = small()
    run = jax.jit(lambda ids, **options: model(ids, policy="none", isolation="none", **options))
    one, two = ids[:1, :2], ids[1:, :4]
    packed = jnp.concatenate([one, two], axis=1)
    got = run(
        packed,
        segments=jnp.asarray([[7] * 2 + [3] * 4]),
        positions=jnp.asarray([[0, 1, 0, 1, 2, 3]]),
    )
    pad = [jnp.pad(x, ((0, 0), (0, 6 - x.shape[1]))) for x in (one, two)]
    alone = run(
        jnp.concatenate(pad),
        segments=jnp.ones((2, 6), int),
        positions=jnp.tile(jnp.arange(6), (2, 1)),
    )
    np.testing.assert_allclose(got[0, :2], alone[0, :2], rtol=0, atol=LOGITS)
    np.testing.assert_allclose(got[0, 2:], alone[1, :4], rtol=0, atol=LOGITS)


def test_keys_and_values_cross_the_checkpoint_boundary():
    """They are a result of the layer that makes them, and an argument of a reader."""
    model, ids = small((SLIDING, FULL) * 3, readers=2)
    assert model.config.donors == {SLIDING: 2, FULL: 3}
    h = model.embed(ids)
    ple = model.per_layer_inputs(ids, h)
    positions = jnp.zeros(ids.shape, int)
    made = {}
    for i, (layer, kind) in enumerate(zip(model.layers, model.config.layer_types, strict=True)):
        assert layer.reads == (i >= 4)
        if layer.reads:
            h = layer(h, ple[:, :, i], positions, Mask(), shared=made[kind])
        else:
            h, made[kind] = layer(h, ple[:, :, i], positions, Mask())
    np.testing.assert_allclose(model.norm(h), model.hidden(ids, positions=positions), atol=LOGITS)


def inner_jaxprs(params):
    for x in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
            yield getattr(x, "jaxpr", x)


# -- Policies and isolations -------------------------------------------------------------------------


def loss_and_gradients(model, ids, **options):
    """The gradients by name; those of a model in periods as of one without."""
    step = jax.jit(jax.value_and_grad(lambda m: next_token_loss(m, ids, **options).total))
    value, grads = step(model)
    if model.embed_tokens_per_layer is None:
        grads = grads.one_by_one()
    return value, dict(zip(weights.stored_names(grads), jax.tree.leaves(grads), strict=True))


@ft.cache
def whole():
    return loss_and_gradients(*small(), policy="none", isolation="none")


def agrees(policy, isolation):
    same(loss_and_gradients(*small(), policy=policy, isolation=isolation), whole())


def same(got, wanted, tolerance=2e-5):
    (value, grads), (want, want_grads) = got, wanted
    # Equal but for how XLA fuses: a few roundings of a mean of order 1.
    np.testing.assert_allclose(value, want, rtol=5e-7)
    for key, x in grads.items():
        # The scalars' gradients are sums of large numbers of both signs.
        alike = want_grads if key.endswith("layer_scalar") else [key]
        scale = max(np.abs(want_grads[k]).max() for k in alike if k[-9:] == key[-9:])
        np.testing.assert_allclose(x, want_grads[key], rtol=0, atol=tolerance * scale, err_msg=key)


# Policies that keep different tensors, each under another isolation, and every isolation under full.
SAMPLE = [
    ("full", "loop"),
    ("full", "barrier"),
    ("full", "both"),
    ("minimal_with_context", "loop"),
    ("qkv_proj_offloaded", "barrier"),
]


@pytest.mark.parametrize(("policy", "isolation"), SAMPLE)
def test_policies_and_isolations(policy, isolation):
    agrees(policy, isolation)


PROGRAMS = {}  # policies that come to the same program, as some do here, share its run


def on_the_reference(policy, isolation):
    """Loss and gradients of the reference's model and batch: nine layers, the last four readers."""
    model, ref = case("tiny_e2b")
    options = {"policy": policy, "isolation": isolation}
    step = jax.jit(lambda m: gradients(m, jnp.asarray(ref["input_ids"]), **options)).lower(model)
    if (text := step.as_text()) not in PROGRAMS:
        # LLVM's optimisations take most of the time, and change nothing of what is kept.
        compiled = step.compile({"xla_backend_optimization_level": 0})
        PROGRAMS[text] = jax.device_get(compiled(model))
    return PROGRAMS[text]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_with_every_isolation(policy, isolation):
    same(on_the_reference(policy, isolation), on_the_reference("none", "none"))


def test_a_policy_per_layer():
    model, ids = small()

    def kept(policy):
        shapes = jax.eval_shape(
            lambda m: jax.vjp(lambda m: m.hidden(ids, policy=policy, isolation="none"), m)[1], model
        )
        return sum(x.size for x in jax.tree.leaves(shapes))

    mixed = ["full", "none", "full", "full"]
    assert kept("full") < kept(mixed) < kept(["none"] * 4) == kept("none")
    with pytest.raises(ValueError, match="3 given for 4 layers"):
        model(ids, policy=mixed[1:])
    assert kept({SLIDING: "full", FULL: "none"}) < kept("none")


def test_full_runs_each_layer_twice():
    """Every matrix product of a layer, those of keys and values too: once more than under `none`."""
    model, ids = small()

    def products(fn, *args):
        def count(jaxpr):
            inner = (count(j) for e in jaxpr.eqns for j in inner_jaxprs(e.params))
            return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(inner)

        return count(jax.make_jaxpr(fn)(*args).jaxpr)

    def gradient(policy):
        return jax.grad(lambda m: next_token_loss(m, ids, policy=policy, isolation="none").total)

    h = model.embed(ids)
    around = products(lambda m: m.per_layer_inputs(ids, h), model)
    layers = products(lambda m: m.hidden(ids, policy="none", isolation="none"), model) - around
    assert layers == 4 * 9 + 2 * 2  # nine in every layer; k and v in the first two
    assert products(gradient("full"), model) - products(gradient("none"), model) == layers


# -- Rows and periods --------------------------------------------------------------------------------


def test_some_rows_at_a_time():
    """Blocks of rows, each layer making its own input, are the same model: padding and segments too."""
    model, ids = small(shape=(4, 10))
    valid = jnp.arange(10) < jnp.asarray([[10], [7], [4], [9]])
    segments = jnp.arange(10) // jnp.asarray([[3], [4], [5], [9]])
    gradients = ft.partial(loss_and_gradients, model, ids, valid=valid, segments=segments)
    wanted = gradients(policy="none", isolation="none")
    for size, isolation, policy in (
        (None, "loop", "full"),
        (1, "loop", "full"),
        (3, "barrier", "full"),
        (1, "loop", "qkv_proj_offloaded"),
        (3, "barrier", Policy(offload=("decoder_layer_input",))),
    ):
        same(gradients(rows=Rows(size), isolation=isolation, policy=policy), wanted)


def periods(model):
    return [(len(s.period), s.repeats) for s in model.layers]


@pytest.mark.parametrize(
    ("config", "found"), [(Config.e2b(), [(5, 3), (5, 4)]), (Config.e4b(), [(6, 4), (6, 3)])]
)
def test_periods_of_the_full_models(config, found):
    new = lambda key: Gemma4(config, key=key).in_periods()  # noqa: E731
    assert periods(jax.eval_shape(new, jax.random.key(0))) == found


def test_stacked_layers():
    """The layers as periods, found by themselves: those that make K/V, and those that read them."""
    model, ids = small((SLIDING, FULL) * 4, readers=4)
    stacked = model.in_periods()
    assert periods(stacked) == [(2, 2), (2, 2)]
    wanted = loss_and_gradients(model, ids, policy="none", isolation="none")
    same(loss_and_gradients(stacked, ids), wanted, tolerance=1e-4)  # twice as many layers
    blocks = loss_and_gradients(stacked, ids, rows=Rows(1), policy="save_qkv_proj")
    same(blocks, wanted, tolerance=1e-4)
    back = stacked.one_by_one()
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(model)))


# -- Parts --------------------------------------------------------------------------------------------


def test_rope_by_hand():
    """Pairs (j, j + D/2) turned by position * theta**(-2j/D), the first quarter of them."""
    D, theta = 16, 100.0
    x = np.random.default_rng(0).normal(size=(1, 3, 2, D)).astype(np.float32)
    positions = np.asarray([[5, 0, 11]])
    got = np.asarray(rope(jnp.asarray(x), jnp.asarray(positions), theta, 0.25))
    want = x.copy()
    for t, position in enumerate(positions[0]):
        for j in range(2):
            angle = position * theta ** (-2 * j / D)
            a, b = x[0, t, :, j], x[0, t, :, j + D // 2]
            want[0, t, :, j] = a * np.cos(angle) - b * np.sin(angle)
            want[0, t, :, j + D // 2] = b * np.cos(angle) + a * np.sin(angle)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu_is_jax_own(dtype):
    x = jnp.linspace(-6, 6, 101).astype(dtype)

    def reference(x):
        return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(dtype)

    np.testing.assert_array_equal(gelu(x), reference(x))
    g, r = (jax.vjp(f, x)[1](jnp.ones_like(x))[0] for f in (gelu, reference))
    # For large negative numbers the derivative is a difference of numbers near one.
    atol = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(g.astype(np.float32), r.astype(np.float32), rtol=0, atol=atol)


def test_every_weight_counts():
    _, grads = whole()
    assert all(jnp.abs(g).max() > 0 for g in grads.values())


def test_random_weights():
    """Logits of a new model are of order one, softcapped or not."""
    model, ids = small()
    new = jax.jit(lambda: Gemma4(model.config, key=jax.random.key(0)))()
    logits = jax.jit(lambda m: m(ids, policy="none", isolation="none"))(new)
    assert 0.3 < float(logits.std()) < 3


# -- Config --------------------------------------------------------------------------------------------


def raw():
    return json.loads((DATA / "tiny_e2b" / "config_hub_style.json").read_text())


def test_configs_survive_writing():
    for config in (Config.e2b(), Config.e4b(), load_config(DATA / "tiny_e2b")):
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_zero_padded_layer_numbers():
    config = raw()
    del config["global_head_dim"]
    config["per_layer_config"] = {f"{i:02}": {"head_dim": 32} for i in (1, 3, 6, 8)}
    assert Config.from_dict(config) == load_config(DATA / "tiny_e2b")


def test_the_last_layer_is_read_as_full_attention():
    config = raw()
    config["layer_types"][-1] = SLIDING
    assert Config.from_dict(config).layer_types[-1] == FULL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": None}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 8 + ["linear"]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"num_hidden_layers": 10}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 2**23, "vocab_size": 2**23}, "parameters"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 8}, "keys and values"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"pad_token_id": 89}, "pad_token_id"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rope_type"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_bad_configs(change, message):
    # A TypeError where the tests check the types of fields first.
    with pytest.raises((ValueError, TypeError), match=message):
        Config.from_dict(raw() | change)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", "[" * 200_000, "\x00", '{"vocab_size": 1e999}']
)
def test_bad_config_files(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path)
