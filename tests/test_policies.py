"""Policies: what the names mean, and what is really kept under them."""

import itertools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from remat_scan import POLICY_NAMES, TENSOR_NAMES, Policy, blockwise, checkpointed_layer
from remat_scan._policies import resolve

# A layer in which every tensor that the policies know has a length of its own.
LENGTHS = {
    name: n
    for n, name in enumerate(
        (name for name in TENSOR_NAMES if name != "decoder_layer_input"), start=20
    )
}
INPUT, UNNAMED = 10, 40


def layer(x):
    total = jnp.sum(x)
    for name, n in LENGTHS.items():
        total += jnp.sum(jnp.sin(checkpoint_name(jnp.sin(total + jnp.arange(1.0 * n)), name)))
    return x + jnp.sum(jnp.sin(jnp.sin(total + jnp.arange(1.0 * UNNAMED))))


def kept(policy, isolation="none", layer=layer):
    """The lengths of the vectors that go from the forward to the backward pass."""
    wrapped = checkpointed_layer(layer, policy=policy, isolation=isolation)

    def residuals(x):
        return jax.tree.leaves(jax.vjp(wrapped, x)[1])

    shapes = jax.make_jaxpr(residuals)(jnp.ones(INPUT)).out_avals
    lengths = {s.shape[-1] for s in shapes if s.ndim and s.shape[-1] > 1}
    return {name for name, n in LENGTHS.items() if n in lengths} | (
        {"unnamed"} if UNNAMED in lengths else set()
    )


QKV = {"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"}
MLP_IN = {"mlpwi_0", "mlpwi_1", "mlpwi"}

# Written down from MaxText's documentation of `remat_policy`, not from our table.
KEPT = {
    "full": set(),
    "custom": set(),
    "minimal": QKV | MLP_IN | {"out_proj", "mlpwo"},
    "minimal_with_context": QKV | MLP_IN | {"out_proj", "mlpwo", "context"},
    "minimal_offloaded": QKV | MLP_IN | {"out_proj", "mlpwo"},
    "save_qkv_proj": QKV,
    "qkv_proj_offloaded": QKV - {"qkv_proj"},
    "save_out_proj": {"out_proj"},
    "save_dot_except_mlp": QKV | {"out_proj"},
    "save_dot_except_mlpwi": QKV | {"out_proj", "mlpwo"},
    "save_dot_with_context_except_mlp": QKV | {"out_proj", "context"},
    "nothing_saveable": set(),
    "everything_saveable": {*LENGTHS, "unnamed"},
    "none": {*LENGTHS, "unnamed"},
}


@pytest.mark.parametrize("isolation", ["none", "loop", "barrier"])
@pytest.mark.parametrize("policy", KEPT)
def test_what_each_name_keeps(policy, isolation):
    assert kept(policy, isolation) == KEPT[policy]


@pytest.mark.parametrize("isolation", ["none", "loop", "barrier"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(save=("mlpwi*",)), MLP_IN),
        (Policy(save=("mlpwi*",), recompute=("mlpwi_0",)), MLP_IN - {"mlpwi_0"}),
        (Policy(save=("mlpwi_0",), recompute=("mlpwi*",)), {"mlpwi_0"}),
        (Policy(unnamed="save"), {*LENGTHS, "unnamed"}),
        ({"context": "device", "mlpwo": "offload"}, {"context", "mlpwo"}),
        (jax.checkpoint_policies.save_only_these_names("context"), {"context"}),
        (lambda prim, *_, **params: params.get("name") == "mlpwo", {"mlpwo"}),
        (None, set()),
    ],
    ids=itertools.count(),
)
def test_what_other_spellings_keep(policy, expected, isolation):
    assert kept(policy, isolation) == expected


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request):
    if not hasattr(jax.config, "jax_remat3"):
        if request.param:
            pytest.skip("this jax has no jax_remat3")
        yield False
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("isolation", ["none", "loop", "barrier"])
@pytest.mark.parametrize("policy", ["full", "minimal", "save_out_proj", "qkv_proj_offloaded"])
def test_named_policies_under_both_remats(remat3, policy, isolation):
    assert kept(policy, isolation, lambda x: layer(x)) == KEPT[policy]


@pytest.mark.parametrize("isolation", ["none", "loop", "barrier"])
def test_bare_callables_under_both_remats(remat3, isolation):
    """They were reported to become full rematerialisation under jax_remat3 (jax#39432)."""

    def only_sin(prim, *_, **params):
        return prim.name == "sin"

    if remat3:
        with pytest.warns(UserWarning, match="under jax_remat3"):
            assert "unnamed" not in kept(only_sin, isolation, lambda x: layer(x))
    else:
        assert "unnamed" in kept(only_sin, isolation, lambda x: layer(x))


def _branches(fn, x):
    return jax.lax.cond(x[0, 0] > 0, fn, lambda x: 2 * x, x)


def _custom(fn, x):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped(x)


WITHIN = {
    "jit": lambda fn, x: jax.jit(fn)(x),
    "checkpoint": lambda fn, x: jax.checkpoint(fn)(x),
    "scan": lambda fn, x: jax.lax.scan(lambda c, x: (c, fn(x)), 0, x[:, None])[1][:, 0],
    "vmap": lambda fn, x: jax.vmap(fn)(x[:, None])[:, 0],
    "cond": _branches,
    "custom_jvp": _custom,
    "blockwise": lambda fn, x: blockwise(fn, axis=0, size=2)(x),
    "one block": lambda fn, x: blockwise(fn, axis=0, size=8)(x),
    "blocks and a rest": lambda fn, x: blockwise(fn, axis=0, size=3)(x),
}


@pytest.mark.parametrize("isolation", ["loop", "barrier"])
@pytest.mark.parametrize("within", WITHIN)
def test_names_are_found_wherever_they_are(remat3, within, isolation):
    """What is kept is all of the tensor, and when it is to be offloaded, on the host: in silence it
    would cost what it was meant to save. jax_remat3 has no eyes for the inside of a `custom_jvp`."""

    def named(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "q"))

    def gradients(policy, isolation):
        layer = checkpointed_layer(
            lambda x: WITHIN[within](named, x), policy=policy, isolation=isolation
        )
        return jax.grad(lambda x: jnp.sum(layer(x) ** 2))

    def sizes(policy, space):
        """Of all that crosses from the forward to the backward pass."""
        layer = checkpointed_layer(
            lambda x: WITHIN[within](named, x), policy=policy, isolation=isolation
        )
        kept = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(layer, x)[1]))(x)
        outs = {id(v): v.aval for v in kept.jaxpr.outvars}
        return sum(a.size for a in outs.values() if a.ndim > 1 and a.memory_space == space)

    x = jnp.linspace(0.1, 2, 32).reshape(8, 4)
    wanted = gradients("full", "none")(x)
    for policy in (Policy(save=("q",)), Policy(offload=("q",))):
        found = 0 if remat3 and within == "custom_jvp" else x.size
        on_host = found if policy.offloads else 0
        assert sizes(policy, jax.memory.Space.Host) == on_host
        assert sizes(policy, jax.memory.Space.Device) == x.size + found - on_host  # the input too
        assert jnp.allclose(gradients(policy, isolation)(x), wanted, rtol=1e-5)


def test_dots(remat3):
    def layer(x):
        product = jnp.sin(x) @ jnp.ones((INPUT, 17))
        batched = jnp.einsum(
            "bij,bjk->bik", jnp.ones((3, 2, 17)) * product[0, 0], jnp.ones((3, 17, 19))
        )
        return jnp.sum(jnp.sin(product)) + jnp.sum(jnp.sin(batched))

    def lengths(policy):
        wrapped = checkpointed_layer(layer, policy=policy, isolation="none")
        avals = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(wrapped, x)[1]))(
            jnp.ones((4, INPUT))
        ).out_avals
        return {17, 19} & {a.shape[-1] for a in avals if a.ndim >= 2 and a.shape[0] in (3, 4)}

    assert lengths("full") == set()
    assert {17, 19} <= lengths("dots_saveable")
    assert lengths("dots_with_no_batch_dims_saveable") == {17}
    assert lengths("offload_dot_with_no_batch_dims") == {17}


# -- The value -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_names_print_compare_and_survive_json(name):
    policy = resolve(name)
    assert str(policy) == name
    again = Policy.from_json(policy.to_json())
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == name
    json.loads(policy.to_json())


names = st.sampled_from([*TENSOR_NAMES, "own_name", "mlpwi*", "*_proj", "other"])


@st.composite
def policies(draw):
    save = draw(st.sets(names, max_size=3))
    offload = draw(st.sets(names, max_size=3)) - save
    recompute = draw(st.sets(names, max_size=3)) - save - offload
    unnamed = draw(st.sampled_from(["recompute", "dots", "dots_with_no_batch_dims"]))
    return Policy(sorted(save), sorted(offload), sorted(recompute), unnamed=unnamed)


@given(policies())
def test_json_round_trip(policy):
    assert Policy.from_json(policy.to_json()) == policy
    assert eval(str(policy), {"Policy": Policy}) == policy


@given(policies(), policies(), st.sampled_from([*TENSOR_NAMES, "own_name", "another"]))
def test_either_keeps_what_one_keeps(a, b, name):
    """`|` keeps a tensor that either keeps; where the two disagree about where, on the device."""
    actions = {a.action(name), b.action(name)}
    expected = next(v for v in ("save", "offload", "recompute") if v in actions)
    assert (a | b).action(name) == (b | a).action(name) == expected


def test_composing_with_names_and_none():
    assert (resolve("save_qkv_proj") | "save_out_proj").action("out_proj") == "save"
    assert resolve("full") | "none" == resolve("none")
    with pytest.raises(TypeError, match="save_from_both_policies"):
        Policy(function=lambda *_, **__: True) | "full"


WRONG = """
import itertools
from remat_scan import Policy
from remat_scan._policies import resolve

for make in (
    lambda: resolve("minimall"),
    lambda: resolve("xyz"),
    lambda: resolve(3),
    lambda: Policy(save="context"),
    lambda: Policy(save=(3,)),
    lambda: Policy(("a",), ("a",)),
    lambda: Policy(unnamed="all"),
    lambda: Policy(("a",), checkpoint=False),
    lambda: Policy(("a",), unnamed="save"),
    lambda: Policy(("a",), function=print),
    lambda: Policy.custom(query="device"),
    lambda: Policy.custom(query_proj="host"),
    lambda: Policy.from_json('{"keep": []}'),
    lambda: Policy(function=print).to_json(),
    lambda: resolve("none").as_function(),
):
    try:
        make()
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""
MESSAGES = """
ValueError Did you mean 'minimal'.*Known: none, full
ValueError 'xyz' is no known policy. Known: none, full
TypeError expected a remat_scan.Policy
TypeError save=\\('context',\\)
TypeError strings
ValueError 'a' is in save and in offload
ValueError not one of recompute
ValueError give it alone
ValueError give it alone
ValueError give it alone
ValueError Known: query_proj
ValueError Known: remat, device, offload
ValueError expected an object
TypeError can't be written
ValueError leave it out
"""


def test_errors_say_what_is_known():
    """In a process of its own: here, beartype would complain first."""
    run = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=True)
    printed = run.stdout.splitlines()
    for line, expected in zip(printed, MESSAGES.strip().splitlines(), strict=True):
        error, words = expected.split(" ", 1)
        assert line.startswith(error)
        assert re.search(words, line)
