"""Nested schedules: the numbers they promise, in a simulation, in traced and in compiled programs."""

import functools as ft
import math

import jax
import jax.numpy as jnp
import pytest
from helpers import D, T, normal, stream
from hypothesis import given
from hypothesis import strategies as st
from stacks import check, make, repeated
from test_memory import GPU, abstract

from remat_scan import Nested, Policy, Stacked, memory_report, run_stack, stack_layers
from remat_scan._flops import count_flops

SCHEDULES = [
    Nested(),
    Nested(levels=3),
    Nested(levels=5),
    Nested(states=2),
    Nested(states=3),
    Nested(states=6),
]
NUMBERS = [1, 2, 3, 7, 8, 13, 16, 31]


def names(schedule):
    return str(schedule)


def simulate(tree):
    """Reverses a stack as nested checkpoints do; returns the most inputs at a time, and the runs."""
    state = {"kept": 0, "most": 0, "runs": 0}

    def keep(change):
        state["kept"] += change
        state["most"] = max(state["most"], state["kept"])

    def size(tree):
        return 1 if tree == 1 else sum(map(size, tree))

    def forward(children):
        """Up to the last input: that of a segment's first child is the segment's own."""
        for child in children[1:]:
            keep(1)
            del child
        state["runs"] += sum(map(size, children[:-1]))

    def backward(children):
        for i, child in reversed(list(enumerate(children))):
            if child != 1:
                forward(child)
                backward(child)
            else:
                state["runs"] += 1
            keep(-1 if i else 0)

    keep(1)
    forward(tree)
    state["runs"] += size(tree[-1])  # the result is needed once
    backward(tree)
    return state["most"], state["runs"]


@given(st.integers(1, 90), st.one_of(st.builds(Nested, levels=st.integers(1, 6)),
                                     st.builds(Nested, states=st.integers(2, 12))))  # fmt: skip
def test_the_numbers_are_those_of_a_simulation(number, schedule):
    tree = schedule.tree(number)
    assert (schedule.kept(number), schedule.evaluations(number)) == simulate(tree)
    if schedule.states is not None:
        assert schedule.kept(number) <= schedule.states
    else:
        assert schedule.evaluations(number) <= (schedule.levels + 1) * number


@ft.cache
def fewest_advances(layers, snapshots):
    """Tried out: every place of the next snapshot."""
    if layers == 1:
        return 0
    if snapshots == 0:
        return math.inf
    return min(
        m + fewest_advances(m, snapshots) + fewest_advances(layers - m, snapshots - 1)
        for m in range(1, layers)
    )


@pytest.mark.parametrize("states", range(2, 9))
def test_no_schedule_with_so_many_states_runs_fewer_layers(states):
    for layers in range(2, 60):
        r = next(r for r in range(99) if math.comb(states - 1 + r, r) >= layers)
        by_formula = (r + 1) * layers + 1 - math.comb(states - 1 + r, r - 1)
        assert Nested(states=states).evaluations(layers) == by_formula
        assert by_formula == layers + 1 + fewest_advances(layers, states - 1)


def test_the_table_in_the_docstring():
    assert Nested() == Nested(levels=2)
    assert (Nested().kept(64), Nested().evaluations(64)) == (2 * 8 - 1, 3 * 64 - 8)
    assert Nested(levels=3).kept(64) == 3 * 4 - 2
    assert Nested(levels=6).kept(64) == 6 * 2 - 5
    assert (Nested(states=6).kept(64), Nested(states=6).evaluations(64)) == (6, 237)
    assert Nested(states=64).evaluations(64) == Nested(levels=1).evaluations(64) == 128
    assert Nested().tree(13) == ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1), (1, 1))
    assert Nested().tree(0) == ()


# -- In programs -----------------------------------------------------------------------------------


def products(stack, **options):
    """Matrix products in a gradient, of layers that have one each; two are the backward pass's."""
    x = jnp.ones((2, 5))
    run = lambda s, x: jnp.sum(run_stack(s, x, **options).x)  # noqa: E731
    flops, _ = count_flops(jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(stack, x))
    assert flops % (2 * 2 * 5 * 5) == 0
    return flops // (2 * 2 * 5 * 5)


def layer(w, x):
    return jnp.sin(x @ w)


def all_of_each_segment(tree):
    """What is recomputed where the last layer of a segment is not left out."""
    if tree == 1:
        return 1
    size = lambda t: 1 if t == 1 else sum(map(size, t))  # noqa: E731
    return size(tree) + sum(map(all_of_each_segment, tree))


def plain_stack(number):
    return [jax.tree_util.Partial(layer, normal(i, 5, 5)) for i in range(number)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=names)
@pytest.mark.parametrize("number", [1, 2, 13])
@pytest.mark.parametrize("isolation", ["none", "barrier"])
def test_layers_run_as_often_as_promised(schedule, number, isolation):
    stack = plain_stack(number)
    found = products(stack, schedule=schedule, isolation=isolation)
    assert found == schedule.evaluations(number) + 2 * number


@pytest.mark.parametrize("schedule", SCHEDULES, ids=names)
def test_a_loop_runs_all_of_a_segment(schedule):
    stack = plain_stack(13)
    want = 13 + sum(map(all_of_each_segment, schedule.tree(13)))
    assert products(stack, schedule=schedule) == want + 2 * 13


@pytest.mark.parametrize("number", [2, 8, 13, 64])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_stacked_layers_run_once_for_each_level(number, levels):
    stack = [Stacked((jax.tree_util.Partial(layer, normal(0, number, 5, 5)),), number)]
    found = products(stack, schedule=Nested(levels=levels))
    want = number + sum(map(all_of_each_segment, Nested(levels=levels).tree(number)))
    assert found == want + 2 * number
    if number in (8, 64):  # no segment of one layer
        assert want == (levels + 1) * number


def test_stacked_layers_taken_apart_for_a_number_of_states():
    stack = [Stacked((jax.tree_util.Partial(layer, normal(0, 9, 5, 5)),), 9)]
    schedule = Nested(states=3)
    found = products(stack, schedule=schedule, isolation="barrier")
    assert found == schedule.evaluations(9) + 2 * 9


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
@pytest.mark.parametrize(
    ("levels", "states"), [(2, None), (3, None), (None, 6)], ids=["sqrt", "three", "six"]
)
def test_memory_shrinks_by_what_is_no_longer_kept(levels, states, stacked):
    """Temporaries on the CPU: the layer inputs, and what all schedules have in common."""
    number, width, rows = 36, 64, 4096
    layers = [jax.tree_util.Partial(layer, jnp.ones((width, width)) / width)] * number
    if stacked:
        layers = [
            Stacked((jax.tree_util.Partial(layer, jnp.ones((number, width, width))),), number)
        ]
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def temporaries(schedule):
        run = lambda s, x: jnp.sum(run_stack(s, x, schedule=schedule).x)  # noqa: E731
        report = memory_report(jax.grad(run), layers, x, target="cpu")
        return report.temporaries / (rows * width * 4)

    schedule = Nested(levels, states)
    saved = temporaries(None) - temporaries(schedule)
    assert saved >= number - schedule.kept(number) - 3


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPU])
def test_a_sharded_step_at_the_promised_peak(target):
    """Each layer input that is no longer kept is a smaller peak, of 64 MiB here."""
    number, rows, width = 16, 65536 * 4, 256

    def wide(w, x):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    up = abstract((width, 4 * width), spec=("d",), devices=4)
    down = abstract((4 * width, width), spec=(None, "d"), devices=4)
    layers = [jax.tree_util.Partial(wide, {"up": up, "down": down})] * number
    x = abstract((rows, width), spec=("d",), devices=4)

    def report(**options):
        def step(layers, x):
            loss = lambda s: jnp.sum(run_stack(s, x, isolation="barrier", **options).x)  # noqa: E731
            return jax.tree.map(lambda w, g: w - g, layers, jax.grad(loss)(layers))

        return memory_report(step, layers, x, target=target)

    flat = report()
    for schedule in (Nested(), Nested(states=4)):
        nested = report(schedule=schedule)
        state = rows // 4 * width * 4
        saved = (number - schedule.kept(number)) * state
        assert 0.9 * saved <= flat.peak - nested.peak <= 1.1 * saved
        forward = 2 * 2 * rows * width * 4 * width
        extra = schedule.evaluations(number) - 2 * number
        assert nested.flops - flat.flops == extra * forward


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "isolation"),
    [(Nested(), "loop"), (Nested(levels=3), "barrier"), (Nested(states=3), "loop")],
    ids=str,
)
@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "periods"])
def test_unlike_layers_with_values_that_cross(schedule, isolation, stacked):
    """Seven layers, or a period of three twice and one more: written values, collected ones."""
    layers = repeated(2, rest=("wide",))
    stack = stack_layers(layers) if stacked else None
    check(layers, stream(jnp.float32), stack=stack, isolation=isolation, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "number"), [(Nested(), 5), (Nested(levels=3), 8), (Nested(states=3), 2)], ids=str
)
def test_periods_with_inputs_and_keys(schedule, number):
    layers = repeated(number, rest=())
    options = {"per_layer": normal(3, len(layers), T, D), "key": jax.random.key(5)}
    check(layers, stream(jnp.float32), stack=stack_layers(layers), schedule=schedule, **options)


@pytest.mark.parametrize("boundary", [2, 3])
def test_boundaries_are_what_is_nested(boundary):
    layers = [make("mlp", i) for i in range(12)]
    options = {"boundary": boundary, "schedule": Nested(), "key": jax.random.key(5)}
    check(layers, stream(jnp.float32), **options)
    check(layers, stream(jnp.float32), stack=stack_layers(layers), **options)


def test_a_policy_for_each_layer_in_a_segment():
    layers = repeated(3)
    policy = {"reader": "minimal", "0-4": "none", "*": "full"}
    for schedule in (Nested(), Nested(states=3)):
        check(layers, stream(jnp.float32), policy=policy, schedule=schedule)


def test_transformations():
    layers, x = [make("mlp", i) for i in range(7)], stream(jnp.float32)
    for stack in (layers, stack_layers(layers)):
        flat = lambda x: run_stack(stack, x).x  # noqa: E731
        nested = lambda x: run_stack(stack, x, schedule=Nested()).x  # noqa: E731
        for transform in (
            lambda f: jax.jvp(f, (x,), (x,)),
            lambda f: jax.vmap(f)(jnp.stack([x, 2 * x])),
            lambda f: jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (x,))[1] ** 2))(x),
        ):
            for a, b in zip(*map(jax.tree.leaves, map(transform, (flat, nested))), strict=True):
                assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_segment_is_traced_once_for_all_of_its_size():
    """What is traced grows with the number of unlike segments, not of layers."""
    calls = []

    def counted(w, x):
        calls.append(1)
        return layer(w, x)

    stack = [jax.tree_util.Partial(counted, normal(i, 5, 5)) for i in range(16)]
    run = lambda s, x: jnp.sum(run_stack(s, x, schedule=Nested(levels=4)).x)  # noqa: E731
    jax.make_jaxpr(jax.grad(run))(stack, jnp.ones((2, 5)))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: Nested(levels=2, states=3), ValueError, "give one of them"),
        (lambda: Nested(levels=0), ValueError, r"levels=0\): a whole number of at least 1"),
        (lambda: Nested(states=1), ValueError, r"states=1\): a whole number of at least 2"),
        (lambda: run_stack([jnp.sin], 1.0, schedule="sqrt"), TypeError, "Nested"),
        (
            lambda: run_stack([jnp.sin], 1.0, schedule=Nested(), isolation="barrier", overlap=1),
            ValueError,
            "Give one of them",
        ),
        (
            lambda: run_stack([jnp.sin], 1.0, schedule=Nested(), policy=Policy(offload=("q",))),
            ValueError,
            "layer 0 has policy=.*, which offloads",
        ),
    ],
)
def test_mistakes(make_it, error, message):
    with pytest.raises(error, match=message):
        make_it()
