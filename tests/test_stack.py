"""`run_stack` against the plain Python loop: values, gradients, periods, errors."""

import functools as ft
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import D, F, T, assert_close, mlp, normal, stream, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from stacks import PATTERN, TRACES, Mlp, check, loop, make, repeated
from test_memory import GPU, TPU

from remat_scan import (
    Nested,
    Policy,
    Stacked,
    StackLayer,
    memory_report,
    run_stack,
    stack_layers,
    unstack_layers,
)


@pytest.mark.parametrize("isolation", ["loop", "barrier", "both", "none"])
@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
def test_unlike_layers_with_values_that_cross(isolation, stacked):
    layers = repeated()
    stack = stack_layers(layers) if stacked else None
    check(layers, stream(jnp.float32), stack=stack, isolation=isolation)


@pytest.mark.parametrize(("boundary", "stacked"), [(3, False), (2, True), (3, True), (6, True)])
def test_boundaries_periods_and_keys(boundary, stacked):
    layers = repeated(4 if boundary == 6 else 2)
    stack = stack_layers(layers) if stacked else None
    check(layers, stream(jnp.float32), stack=stack, boundary=boundary, key=jax.random.key(5))


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
@pytest.mark.parametrize("as_list", [False, True], ids=["axis", "list"])
def test_each_layer_gets_its_own_input(stacked, as_list):
    layers = repeated()
    own = normal(3, len(layers), T, D)
    stack = stack_layers(layers) if stacked else None
    check(layers, stream(jnp.float32), stack=stack, per_layer=list(own) if as_list else own)


def test_unlike_inputs_and_common_arguments():
    layers = [Mlp(weights(jnp.float32, i)) for i in range(3)]
    own = [jnp.ones(()), jnp.ones((T, 1)), 2.0]
    check(layers, stream(jnp.float32), jnp.ones(D), 0.5, per_layer=own)


def test_own_inputs_get_gradients_through_periods():
    layers, x = repeated(), stream(jnp.float32)
    own, stack = normal(3, len(layers), T, D), stack_layers(layers)
    got = jax.grad(lambda own: jnp.sum(run_stack(stack, x, per_layer=own).x ** 2))(own)
    want = jax.grad(lambda own: jnp.sum(loop(layers, x, per_layer=own)[0] ** 2))(own)
    assert_close(got, want, 400)


def test_given_values_are_read_and_replaced():
    layers = [make(kind, i) for i, kind in enumerate(["reader", "both"] * 3 + ["reader"])]
    value = normal(8, T, D)
    check(layers, stream(jnp.float32), values={"v": value})
    stack = stack_layers(layers)
    assert [type(s) for s in stack] == [StackLayer, Stacked]
    check(layers, stream(jnp.float32), stack=stack, values={"v": value})
    run = lambda run, s: lambda v: jnp.sum(run(s, stream(jnp.float32), values={"v": v})[0])  # noqa: E731
    got, want = jax.grad(run(run_stack, stack))(value), jax.grad(run(loop, layers))(value)
    assert_close(got, want, 400)


@pytest.mark.parametrize("overlap", [1, 2, 9])
@pytest.mark.parametrize("boundary", [1, 2])
def test_bounded_overlap_changes_no_value(overlap, boundary):
    options = {"isolation": "barrier", "overlap": overlap, "boundary": boundary}
    layers = repeated(2)
    check(layers, stream(jnp.float32), **options)
    check(layers, stream(jnp.float32), stack=stack_layers(layers), **options)


def test_overlap_holds_the_weights_of_a_later_layer():
    """Each barrier takes the stream and two arrays of a later layer; the last layers' one has the
    stream alone."""
    layers = [Mlp(weights(jnp.float32, i)) for i in range(4)]
    run = lambda s, x: run_stack(s, x, isolation="barrier", overlap=1).x  # noqa: E731
    eqns = jax.make_jaxpr(run)(layers, stream(jnp.float32)).jaxpr.eqns
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    assert [len(e.invars) for e in barriers] == [3, 3, 3, 1]


def test_policies_by_pattern_index_and_list():
    layers = repeated()
    x = stream(jnp.float32)
    n = len(layers)
    for policy in (
        {"reader": "minimal", "*": "full"},
        {0: "none", "1-4": "minimal", "Wide": "dots_saveable", "*": None},
        ["none"] * 4 + ["full"] * (n - 4),
        ["minimal"] * n,
    ):
        check(layers, x, policy=policy, isolation={"0-3": "barrier", "*": "loop"})


def saved(policy, **options):
    layers = [StackLayer(Mlp(weights(jnp.float32, i)), name=f"layer{i}") for i in range(4)]
    run = lambda s: jnp.sum(run_stack(s, stream(jnp.float32), policy=policy, **options).x)  # noqa: E731
    _, vjp = jax.vjp(run, layers)
    return sum(leaf.shape == (T, F) for leaf in jax.tree.leaves(vjp))


def test_each_layer_really_gets_its_own_policy():
    """Counted by the residuals of the hidden size."""
    keep = {"isolation": "none"}
    assert saved("full", **keep) == 0
    one = saved({"layer2": "minimal", "*": "full"}, **keep)
    assert one > 0
    assert saved({"1-3": "minimal", "*": "full"}, **keep) == 3 * one
    assert saved(["minimal", "full", "full", "minimal"], **keep) == 2 * one


def test_each_layer_really_gets_its_own_isolation():
    """Counted by the loops of the compiled program: one forward and one backward."""
    layers = [Mlp(weights(jnp.float32, i), TRACES) for i in range(4)]

    def loops(isolation):
        run = lambda s, x: jnp.sum(run_stack(s, x, isolation=isolation).x)  # noqa: E731
        compiled = eqx.filter_jit(eqx.filter_grad(run)).lower(layers, stream(jnp.float32)).compile()
        return compiled.compiled.as_text().count(" while(")

    assert loops("none") == 0
    assert loops({"2": "loop", "*": "none"}) == 2
    assert loops({"1-3": "loop", "*": "barrier"}) == 6
    assert loops(["none", "loop", "both", "barrier"]) == 4


def test_a_boundary_keeps_only_what_crosses_it():
    layers = [Mlp(weights(jnp.float32, i)) for i in range(4)]

    def streams_kept(boundary):
        run = lambda s, x: jnp.sum(run_stack(s, x, boundary=boundary, isolation="none").x)  # noqa: E731
        _, vjp = jax.vjp(run, layers, stream(jnp.float32))
        return sum(leaf.shape == (T, D) for leaf in jax.tree.leaves(vjp))

    assert [streams_kept(b) for b in (1, 2, 4)] == [4, 2, 1]


# -- Periods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "cut"),
    [
        ("abc", [1, 1, 1]),
        ("aaaa", ["1x4"]),
        ("ababab", ["2x3"]),
        ("aababab", [1, "2x3"]),
        ("abababa", [1, "2x3"]),
        ("aaaab" * 2, ["1x4", 1, "1x4", 1]),  # 4 to compile
        ("aaaab" * 3, ["5x3"]),  # 5, not 6
        ("aaaab" * 3 + "ccccd" * 4, ["5x3", "5x4"]),
        ("abacab", [1, 1, 1, 1, 1, 1]),
        ("aabbb", ["1x2", "1x3"]),
        ("", []),
    ],
)
def test_periods_are_found(kinds, cut):
    hidden = {"a": 1, "b": 2, "c": 3, "d": 4}
    layers = [Mlp({"wi": jnp.ones((D, hidden[k])), "wo": jnp.ones((hidden[k], D))}) for k in kinds]
    for layer in layers:
        object.__setattr__(layer, "traces", TRACES)
    stack = stack_layers(layers)
    shown = [f"{len(s.period)}x{s.repeats}" if isinstance(s, Stacked) else 1 for s in stack]
    assert shown == cut
    assert eqx.tree_equal(unstack_layers(stack), layers)


@pytest.mark.parametrize(
    "unlike",
    [
        {"scale": jnp.ones(D, jnp.bfloat16)},
        {"scale": jnp.ones(D, jnp.int32)},
        {"scale": np.ones(1, np.float32)},
        {"scale": 1.0},
        {"scale": None},
        {"scale": jnp.ones(D, jnp.float32), "bias": 0},
    ],
    ids=["dtype", "integers", "shape", "static", "none", "tree"],
)
def test_unlike_layers_are_no_period(unlike):
    """Stacked, one of them would change its type or its value."""
    like = jax.tree_util.Partial(lambda w, x: x * w["scale"], {"scale": jnp.ones(D, jnp.float32)})
    other = jax.tree_util.Partial(like.func, unlike)
    assert len(stack_layers([like, like])) == 1
    stack = stack_layers([like, other])
    assert len(stack) == 2
    assert eqx.tree_equal(stack, [like, other])
    with pytest.raises(ValueError, match="Layers 0 and 1 differ"):
        stack_layers([like, other], period=1)


def test_layers_sharded_otherwise_are_no_period():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shardings = [
        NamedSharding(mesh, PartitionSpec("d")),
        NamedSharding(mesh, PartitionSpec(None, "d")),
        NamedSharding(mesh, PartitionSpec("d"), memory_kind="pinned_host"),
    ]
    layers = [
        jax.tree_util.Partial(jnp.matmul, jax.device_put(normal(0, 8, 8), sharding))
        for sharding in shardings
    ]
    assert len(stack_layers(layers)) == 3
    for here, there in itertools.combinations(layers, 2):
        with pytest.raises(ValueError, match=r"float32\[8, 8\] of .* in device in one and"):
            stack_layers([here, there], period=1)
    for layer, sharding in zip(layers, shardings, strict=True):
        (stacked,) = stack_layers([layer, layer])
        (array,) = jax.tree.leaves(stacked)
        assert array.sharding.spec == PartitionSpec(None, *sharding.spec)
        assert array.sharding.memory_kind == sharding.memory_kind


def test_stacking_compiles_once_a_shape():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    compiled = []

    def listen(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def layer(seed):
        weights = [jax.device_put(normal(10 * seed + i, 8, 24), sharding) for i in range(10)]
        return jax.tree_util.Partial(jnp.matmul, weights)

    layers = [layer(0), layer(1)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    (stacked,) = stack_layers(layers)
    count = len(compiled)
    assert count == 1  # the listener hears something, and the ten arrays share one program
    for got, *want in zip(*map(jax.tree.leaves, (stacked, *layers)), strict=True):
        np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.parametrize(("mine", "other"), [(1.0, 2.0), ("a", "b"), (True, 1), (0.0, -0.0)])
def test_layers_of_other_static_values_are_no_period(mine, other):
    layers = [jax.tree_util.Partial(lambda x, w: x, w=w) for w in (mine, other)]
    layers[1] = jax.tree_util.Partial(layers[0].func, w=other)
    assert len(stack_layers(layers)) == 2


def test_a_declared_period():
    layers = [make("mlp", i) for i in range(7)]
    stack = stack_layers(layers, period=3)
    assert [isinstance(s, Stacked) for s in stack].count(True) == 1
    check(layers, stream(jnp.float32), stack=stack)


def test_a_period_is_traced_once_however_often_it_repeats():
    def traces(repeats):
        stack = stack_layers(repeated(repeats, ()))
        before = len(TRACES)
        loss = lambda s, x: jnp.sum(run_stack(s, x).x)  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss))(stack, normal(repeats, repeats, D))
        return len(TRACES) - before, len(str(jaxpr).splitlines())

    (few, short), (many, long) = traces(2), traces(9)
    assert few == many == len(PATTERN)
    assert long - short < 40  # only the slices of what is collected


def test_layers_stacked_by_vmap_are_not_copied():
    def make_one(key):
        wi = jax.random.normal(key, (D, F), jnp.float32)
        return Mlp({"wi": wi, "wo": jnp.ones((F, D), jnp.float32)}, TRACES)

    blocks = eqx.filter_vmap(make_one)(jax.random.split(jax.random.key(0), 5))
    stack = [Stacked((blocks,), 5)]
    check(unstack_layers(stack), stream(jnp.float32), stack=stack)
    jaxpr = jax.make_jaxpr(lambda s, x: run_stack(s, x).x)(stack, stream(jnp.float32))
    assert "concatenate" not in str(jaxpr)


def test_stacks_work_as_parameters():
    """An optimiser step on the stacked tree is the step on the list."""
    layers, x = repeated(), stream(jnp.float32)
    step = lambda w, g: w - 0.1 * g  # noqa: E731
    loss = lambda run: lambda s: jnp.mean(run(s, x)[0] ** 2)  # noqa: E731
    stack = stack_layers(layers)
    for _ in range(2):
        stack = jax.tree.map(step, stack, jax.grad(loss(run_stack))(stack))
        layers = jax.tree.map(step, layers, jax.grad(loss(loop))(layers))
    assert_close(unstack_layers(stack), layers, 400)


def test_functions_partials_and_methods():
    def scale(w, x, *, by):
        return mlp(w, x) * by

    layers = [ft.partial(scale, weights(jnp.float32, i), by=0.5) for i in range(4)]
    stack = stack_layers([*layers, jnp.sin, jnp.sin, Mlp(weights(jnp.float32)).__call__])
    assert [type(s) for s in stack[:2]] == [Stacked, Stacked]
    x = stream(jnp.float32)
    want = loop([*layers, jnp.sin, jnp.sin, Mlp(weights(jnp.float32))], x)[0]
    assert_close(run_stack(stack, x).x, want, 200)


def test_streams_of_any_kind():
    """A pytree with a static leaf, a key and integers; a value written in a period likewise."""

    def layer(x):
        key, mine = jax.random.split(x["key"])
        y = {**x, "h": jnp.sin(x["h"]) + jax.random.normal(mine), "key": key, "n": x["n"] + 1}
        return y, {"key": mine, "name": "v", "h": y["h"]}

    layers = [StackLayer(layer, writes="v")] * 4
    x = {"h": jnp.ones(3), "key": jax.random.key(1), "n": jnp.array(0), "static": "text"}
    want, values, _ = loop(layers, x)
    for stack in (layers, stack_layers(layers)):
        got = run_stack(stack, x)
        assert got.x["static"] == "text"
        assert got.values["v"]["name"] == "v"
        for a, b in ((got.x, want), (got.values, values)):
            assert_close(jax.random.key_data(jax.tree.leaves(a, is_leaf=None)[1]),
                         jax.random.key_data(jax.tree.leaves(b)[1]), 1)  # fmt: skip
        assert_close(got.x["h"], want["h"], 40)


@pytest.mark.parametrize("tensor", ["decoder_layer_input", "mlpwi"])
@pytest.mark.parametrize("kinds", [["mlp"] * 4, PATTERN * 2], ids=["one", "period of three"])
def test_values_of_offload_in_periods(tensor, kinds):
    layers = [make(kind, seed) for seed, kind in enumerate(kinds)]
    policy = Policy(offload=(tensor,))
    check(layers, stream(jnp.float32), stack=stack_layers(layers), policy=policy)


@pytest.mark.parametrize("target", [TPU, GPU])
def test_offload_in_periods(target):
    """All of a tensor is on the host. Without the layers' inputs the device needs less than if they
    stayed; a tensor in the middle costs about what recomputing it does, not what keeping it does."""
    repeats, tokens, width = 32, 8192, 512

    def layer(w, x):
        x = x + checkpoint_name(x @ w["middle"], "middle")
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    shapes = {"middle": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    w = {k: jax.ShapeDtypeStruct((repeats, *s), jnp.float32) for k, s in shapes.items()}
    stack = [Stacked((jax.tree_util.Partial(layer, w),), repeats)]
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)

    def report(policy):
        loss = lambda s, x: jnp.mean(run_stack(s, x, policy=policy).x ** 2)  # noqa: E731
        return memory_report(jax.grad(loss), stack, x, target=target)

    size = repeats * tokens * width * 4
    full, saved = report("full"), report(Policy(save=("middle",)))
    inputs = report(Policy(offload=("decoder_layer_input",)))
    middle = report(Policy(offload=("middle",)))
    assert (inputs.host, middle.host) == (size, size)
    assert inputs.peak < full.peak - 0.7 * size
    assert middle.peak <= 1.02 * full.peak < saved.peak - 0.7 * size


# -- Transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["loop", "barrier"])
def test_transformations(isolation):
    layers, x = repeated(2, ("wide",)), stream(jnp.float32)
    want = lambda x: loop(layers, x)[0]  # noqa: E731
    for stack in (layers, stack_layers(layers)):
        got = lambda x: run_stack(stack, x, isolation=isolation).x  # noqa: E731
        assert_close(jax.jvp(got, (x,), (x,)), jax.jvp(want, (x,), (x,)), 600)
        xs = jnp.stack([x, 2 * x])
        assert_close(jax.vmap(got)(xs), jax.vmap(want)(xs), 600)
        second = lambda f: jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (x,))[1]))(x)  # noqa: E731
        assert_close(second(got), second(want), 2000)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
def test_sharded(stacked):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    w = [{"wi": normal(i, 8, 16) / 4, "wo": normal(i + 9, 16, 8) / 4} for i in range(4)]
    layers = [Mlp(jax.tree.map(lambda a: put(a, "d"), each), TRACES) for each in w]
    x = put(normal(3, 8, 8), "d")
    stack = stack_layers(layers) if stacked else layers
    if stacked:
        assert stack[0].period[0].w["wi"].sharding.spec == PartitionSpec(None, "d")
    got = jax.jit(jax.grad(lambda s, x: jnp.mean(run_stack(s, x).x ** 2)))(stack, x)
    want = jax.grad(lambda s, x: jnp.mean(loop(s, x)[0] ** 2))(layers, x)
    assert_close(unstack_layers(got), want, 600)


# -- Random stacks ---------------------------------------------------------------------------------

KINDS = ["mlp", "wide", "writer", "reader", "both"]
NESTED = [Nested(), Nested(levels=3), Nested(states=2), Nested(states=4)]
SCHEDULES = [{}, *({"schedule": schedule} for schedule in NESTED)]
OVERLAPS = [{"overlap": 1}, {"overlap": 2}]


@st.composite
def stacks(draw):
    pieces = draw(
        st.lists(
            st.tuples(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(1, 3)),
            min_size=1,
            max_size=3,
        )
    )
    kinds = [kind for pattern, times in pieces for kind in pattern * times]
    uniform = draw(st.sampled_from(["full", "none", "minimal", "dots_saveable"]))
    per_kind = {"reader": "full", "Wide": "minimal", "*": uniform}
    boundary = draw(st.integers(1, 3))
    isolation = draw(st.sampled_from(["loop", "barrier", "both", "none"]))
    return {
        "kinds": kinds,
        "stacked": draw(st.booleans()),
        "own": draw(st.sampled_from([None, "axis", "list"])),
        "keyed": draw(st.booleans()),
        "options": {
            "policy": uniform if boundary > 1 else draw(st.sampled_from([uniform, per_kind])),
            "isolation": isolation,
            "boundary": boundary,
            **draw(st.sampled_from(SCHEDULES if isolation != "barrier" else SCHEDULES + OVERLAPS)),
        },
    }


@settings(max_examples=settings().max_examples // 5)  # each compiles four programs
@given(stacks())
def test_random_stacks_are_the_loop(case):
    layers = [make(kind, seed) for seed, kind in enumerate(case["kinds"])]
    options = dict(case["options"])
    if isinstance(options["policy"], dict):
        names = {StackLayer(a).name if isinstance(a, Mlp) else a.name for a in layers}
        options["policy"] = {k: v for k, v in options["policy"].items() if k in {"*", *names}}
    stack = stack_layers(layers) if case["stacked"] else layers
    runs = [s for s in stack if isinstance(s, Stacked)]
    if any(s.repeats * len(s.period) % options["boundary"] for s in runs):
        options["boundary"] = 1
    if any(
        len(s.period) % options["boundary"] and options["boundary"] % len(s.period) for s in runs
    ):
        options["boundary"] = 1
    if case["own"]:
        own = normal(4, len(layers), T, D)
        options["per_layer"] = own if case["own"] == "axis" else list(own)
    if case["keyed"]:
        options["key"] = jax.random.key(7)
    check(layers, stream(jnp.float32), stack=stack, values={"v": normal(6, T, D)}, **options)


# -- Errors ----------------------------------------------------------------------------------------


def untraced(*_, **__):
    raise AssertionError("traced before the stack was checked")


def named(name, **spec):
    return StackLayer(untraced, name=name, **spec)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (
            [named("a"), named("b", reads="kv"), named("c", writes="kv")],
            {},
            "Layer 1 (b) reads 'kv' before any layer has produced it. Layer 2 produces it later.",
        ),
        ([named("b", reads="kv", writes="kv")], {}, "Layer 0 produces it itself."),
        (
            [named("a", writes="kv_full"), named("b", reads="kv_ful")],
            {},
            "No layer writes it; did you mean 'kv_full'?",
        ),
        ([named("a"), named("b")], {"policy": {"c": "full"}}, "'c' matches no layer. There are 2"),
        ([named("a"), named("b")], {"policy": {"a": "full"}}, "no pattern matches layer 1 (b)"),
        ([named("a")], {"policy": {"mlpwo": "device"}}, "Policy.custom(...)"),
        ([named("a")], {"policy": {"1-3": "full"}}, "'1-3' matches no layer"),
        ([named("a")], {"policy": "ful"}, "Did you mean 'full'?"),
        ([named("a")], {"isolation": "lop"}, "isolation='lop' is not one of"),
        ([named("a")], {"isolation": ["loop"] * 2}, "isolation: 2 given for 1 layers"),
        ([named("a")] * 2, {"per_layer": [1]}, "a list of 1 entries, but there are 2 layers"),
        (
            [named("a")] * 2,
            {"per_layer": {"e": jnp.ones((3, 2))}},
            "per_layer['e'] needs a leading",
        ),
        ([named("a")] * 2, {"boundary": 2, "policy": ["none", "full"]}, "are in one boundary"),
        ([named("a")], {"boundary": 0}, "boundary=0"),
        ([named("a")], {"overlap": 1}, "overlap=1 needs isolation='barrier'"),
        ([named("a")], {"overlap": -1, "isolation": "barrier"}, "overlap=-1"),
        ([Stacked((named("a"),), 2)], {"policy": ["none", "full"]}, "are in one period"),
        ([Stacked([named("a")] * 2, 3)], {"boundary": 4}, "unevenly"),
        ([Stacked([named("a")] * 2, 2)], {"boundary": 3}, "unevenly"),
    ],
)
def test_mistakes_are_named_before_tracing(layers, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_stack(layers, jnp.ones(2), **options)


def test_mistakes_found_in_tracing():
    with pytest.raises(TypeError, match=r"must return \(x, kv\), got"):
        run_stack([StackLayer(jnp.sin, writes="kv")], jnp.ones(2))
    grow = lambda x: jnp.concatenate([x, x])  # noqa: E731
    with pytest.raises(TypeError, match=r"Layers 0-0 repeat.*f\d+\[2\].*f\d+\[4\]"):
        run_stack([Stacked((grow,), 3)], jnp.ones(2))
    with pytest.raises(ValueError, match=r"per_layer\[0\] and per_layer\[1\] are unlike"):
        run_stack(
            [Stacked((lambda x, y: x,), 2)], jnp.ones(2), per_layer=[jnp.ones(1), jnp.ones(2)]
        )
    change = StackLayer(lambda x, v: (x, v.astype("float16")), reads="v", writes="v")
    with pytest.raises(TypeError, match="read 'v' from the repetition before"):
        run_stack([Stacked((change,), 2)], jnp.ones(2), values={"v": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"[Cc]allable"):
        run_stack([3], jnp.ones(2))


def test_mistakes_in_stacking():
    blocks = Mlp({"wi": jnp.ones((4, D, F)), "wo": jnp.ones((3, F, D))})
    with pytest.raises(ValueError, match=r"leading axis of 4, but period.*'wo'.*\(3, "):
        Stacked((blocks,), 4)
    with pytest.raises(ValueError, match="at least 1"):
        Stacked((), 4)
    unlike = [Mlp({"w": jnp.ones(n)}, TRACES) for n in (2, 3)]
    with pytest.raises(
        ValueError, match=r"Layers 0 and 1 differ: .*\['w'\] is float\d+\[2\] in one"
    ):
        stack_layers(unlike, period=1)
    with pytest.raises(ValueError, match="a period of 2 can't repeat in 2 layers"):
        stack_layers(unlike, period=2)
    with pytest.raises(ValueError, match="twice"):
        StackLayer(jnp.sin, writes="a", collects="a")


def test_an_exception_in_a_layer_arrives_unchanged():
    class MineError(Exception):
        pass

    def fail(x):
        raise MineError("at layer")

    for stack in ([fail], [Stacked((fail,), 2)]):
        with pytest.raises(MineError, match="at layer"):
            run_stack(stack, np.ones(2))


def barriers(jaxpr):
    """The number of operands of each optimization barrier in a program, inner ones left out."""
    return [len(e.invars) for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]


@pytest.mark.parametrize("isolation", ["loop", "barrier", "none"])
def test_cotangents_of_what_layers_share_are_added_up_layer_by_layer(isolation):
    """Left alone, XLA keeps all terms of the sum until the end. What is not differentiated stays
    out: its cotangents would be computed for nothing."""

    def layer(x, memory, scale, shared):
        return jnp.tanh(x + memory * scale + shared)

    layers = [StackLayer(layer, reads="shared", name="reader")] * 3
    x = jnp.linspace(-1, 1, 6)
    memory, scale, shared = x + 1, x - 2, {"shared": x / 3}

    def total(x, memory, scale, shared):
        run = run_stack(layers, x, memory, scale, values=shared, isolation=isolation)
        return jnp.sum(run.x)

    def plain(x, memory, scale, shared):
        for _ in layers:
            x = layer(x, memory, scale, **shared)
        return jnp.sum(x)

    args = (x, memory, scale, shared)
    found = {}
    for wrt in ((0,), (0, 1), (0, 1, 3), (1,)):
        gradient = jax.grad(total, wrt)
        wanted = jax.grad(plain, wrt)(*args)
        jax.tree.map(lambda a, b: assert_close(a, b, 3), gradient(*args), wanted)
        found[wrt] = barriers(jax.make_jaxpr(gradient)(*args).jaxpr)
    if isolation == "loop":  # between the layers: x, and what is differentiated of the rest
        assert found == {(0,): [1, 1], (0, 1): [2, 2], (0, 1, 3): [3, 3], (1,): [2, 2]}
    elif isolation == "none":
        assert not any(found.values())
    assert_close(jax.jvp(total, args, args)[1], jax.jvp(plain, args, args)[1], 3)


@pytest.mark.parametrize("target", [GPU])
def test_what_layers_of_a_period_share_has_one_cotangent(target):
    """In a period as between unrolled layers, the terms of the sum are not all there at once."""
    tokens, width, size = 8192, 512, 8

    def layer(w, x, memory):
        return x + jax.nn.gelu((x + memory) @ w["up"]) @ w["down"]

    shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
    w = {k: jax.ShapeDtypeStruct((3, *s), jnp.bfloat16) for k, s in shapes.items()}
    stack = [Stacked([jax.tree_util.Partial(layer, w)] * size, 3)]
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)

    def peak(wrt):
        def loss(stack, x, memory):
            return jnp.mean(run_stack(stack, x, memory, isolation="barrier").x.astype(float) ** 2)

        return memory_report(jax.grad(loss, wrt), stack, x, x, target=target).peak

    assert peak((0, 1, 2)) - peak((0, 1)) <= 3 * tokens * width * 2


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
def test_inside_shard_map(stacked):
    """What layers share may be the same on all devices where the stream is not."""

    def layer(w, x, memory):
        return jnp.tanh(x * w + memory)

    def of(run, w, x, memory):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
        P = PartitionSpec

        def local(w, x, memory):
            return jax.lax.psum(jnp.sum(run(w, x, memory)), "d")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P())(
            w, x, memory
        )

    def ours(w, x, memory):
        layers = [jax.tree_util.Partial(layer, w[i]) for i in range(3)]
        stack = [Stacked([jax.tree_util.Partial(layer, w)], 3)] if stacked else layers
        return run_stack(stack, x, memory).x

    def plain(w, x, memory):
        for i in range(3):
            x = layer(w[i], x, memory)
        return x

    args = (jnp.linspace(0.5, 1, 3)[:, None], jnp.linspace(-1, 1, 32).reshape(8, 4), jnp.ones(4))
    wanted = jax.grad(ft.partial(of, plain), (0, 1, 2))(*args)
    got = jax.grad(ft.partial(of, ours), (0, 1, 2))(*args)
    jax.tree.map(lambda a, b: assert_close(a, b, 40), got, wanted)
