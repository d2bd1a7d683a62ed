"""Random layers × policies × isolations × transformations against the plain loop.

A layer is a random sequence of operations, each of a kind that some layer wrapper has got wrong:
control flow, custom differentiation rules, keys, integers, effects, casts, closures, aux results.
"""

import dataclasses
import functools as ft
import gc
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import traceback
import types
import weakref
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ISOLATIONS,
    NAMED_POLICIES,
    OFFLOADING,
    assert_close,
    assert_identical,
    doubled_gradient,
    mlp,
    plain,
    tripled_tangent,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from remat_scan import Policy, checkpointed_layer

trace_module = importlib.import_module("remat_scan._trace")

D, F, T = 8, 6, 4  # 8: divisible over the eight simulated devices

# -- Operations: (weights, stream, key, order) -> (stream, key) --------------------------------------


def _mlp(w, x, key, order):
    return mlp(w, x), key


def _gated(w, x, key, order):
    h = checkpoint_name(x @ w["wi"], "mlpwi_0")
    return x + checkpoint_name((jax.nn.silu(h) * h) @ w["wo"], "mlpwo"), key


def _scan(w, x, key, order):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1] + x, key


def _while(w, x, key, order):
    start = jax.lax.stop_gradient(jnp.clip(x, -3, 3))
    y = jax.lax.while_loop(lambda y: jnp.abs(y).max() > 0.5, lambda y: y / 2, start)
    return jnp.sin(x) + y, key


def _fori(w, x, key, order):
    return jax.lax.fori_loop(0, 2, lambda _, y: jnp.sin(y) + x / 2, x), key


def _cond(w, x, key, order):
    return jax.lax.cond(
        order[0] > 0, lambda x: jnp.sin(x) @ w["wi"] @ w["wo"], lambda x: -x, x
    ), key


def _switch(w, x, key, order):
    branches = [lambda x: x, jnp.sin, lambda x: x * w["scale"]]
    return jax.lax.switch(order[0] % 3, branches, x), key


def _custom_vjp(w, x, key, order):
    return doubled_gradient(x), key


def _custom_jvp(w, x, key, order):
    return tripled_tangent(x), key


def _stop_gradient(w, x, key, order):
    return x + jax.lax.stop_gradient(jnp.sin(x) * w["scale"]), key


def _dropout(w, x, key, order):
    key, mine = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(mine, 0.8, x.shape), x, 0), key


def _gather(w, x, key, order):
    return x[order] + x, key


def _narrow(w, x, key, order):
    return x + jnp.sin(x.astype(jnp.float32)).astype(x.dtype), key


_CALLS: list[None] = []


def _effect(w, x, key, order):
    jax.debug.callback(lambda _: _CALLS.append(None), x[0, 0])
    return x * 0.5, key


def _norm(w, x, key, order):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3)
    return h.astype(x.dtype) * w["scale"], key


def _closure(w, x, key, order):
    return x + np.linspace(0, 1, D, dtype=np.float32).astype(x.dtype), key


def _jitted(w, x, key, order):
    return jax.jit(mlp)(w, x), key


def _checkpointed(w, x, key, order):
    return jax.checkpoint(mlp)(w, x), key


def _vmapped(w, x, key, order):
    return jax.vmap(lambda row: jnp.tanh(row @ w["wi"]) @ w["wo"])(x), key


OPERATIONS = (
    _mlp, _gated, _scan, _while, _fori, _cond, _switch, _custom_vjp, _custom_jvp, _stop_gradient,
    _dropout, _gather, _narrow, _effect, _norm, _closure, _jitted, _checkpointed, _vmapped,
)  # fmt: skip
NO_FORWARD_MODE = {_custom_vjp}
NO_BATCHED_PREDICATE = {_while}

FORMS = ("separate", "one dictionary", "keywords", "module", "nested with None")


class Module(eqx.Module):
    w: dict[str, jax.Array]
    operations: tuple = eqx.field(static=True)

    def __call__(self, x, key, order):
        return _apply(self.operations, self.w, x, key, order)


def _apply(operations, w, x, key, order):
    for operation in operations:
        x, key = operation(w, x, key, order)
    aux = {"norm": jnp.abs(x).sum(-1), "flag": x > 0, "order": order[::-1], "nothing": None}
    return x, key, aux


@dataclasses.dataclass(frozen=True)
class Stack:
    """Random layers in a row; `run(wrap, floats, key, order)` is the program."""

    layers: tuple[tuple, ...]
    forms: tuple[str, ...]
    shared: bool  # all layers have the first one's weights

    def run(self, wrap, floats, key, order):
        ws, x = floats
        auxes = []
        for i, (operations, form) in enumerate(zip(self.layers, self.forms, strict=True)):
            w = ws[0 if self.shared else i]
            x, key, aux = _call(wrap, operations, form, w, x, key, order)
            auxes.append(aux)
        return x, key, auxes

    def loss(self, wrap, floats, key, order):
        x, _, auxes = self.run(wrap, floats, key, order)
        total = jnp.sum(x.astype(jnp.float32) * jnp.cos(jnp.arange(D, dtype=jnp.float32)))
        return total + sum(jnp.sum(a["norm"].astype(jnp.float32)) for a in auxes)


def _call(wrap, operations, form, w, x, key, order):
    if form == "separate":
        return wrap(ft.partial(_apply, operations))(w, x, key, order)
    if form == "one dictionary":

        def layer(given):
            return _apply(operations, given["w"], given["x"], given["key"], given["order"])

        return wrap(layer)({"w": w, "x": x, "key": key, "order": order})
    if form == "keywords":

        def layer(w, *, x, key, order, flag):
            assert flag is True
            return _apply(operations, w, x, key, order)

        return wrap(layer)(w, x=x, key=key, order=order, flag=True)
    if form == "module":
        return wrap(Module(w, operations))(x, key, order)

    def layer(pair, rest, nothing):
        assert nothing is None
        return _apply(operations, w, *pair, *rest)  # the weights are closed over

    return wrap(layer)((x, key), [order], None)


POLICIES = (*NAMED_POLICIES, *OFFLOADING, "minimal|dots", "function")


def _policy(name):
    if name == "minimal|dots":
        return Policy(save=("mlpwi*",)) | Policy(unnamed="dots")
    if name == "function":
        return jax.checkpoint_policies.save_any_names_but_these("mlpwi")
    return name


# -- Transformations of (stack, wrap) into a function of the floats ----------------------------------

# The compiler's own passes all run; only the machine code is not polished, which took two thirds of the
# time and has nothing to do with what is tested.
_compiled = ft.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def _value_and_grad(stack, wrap, floats, key, order):
    results = stack.run(wrap, floats, key, order)
    return results, jax.grad(lambda f: stack.loss(wrap, f, key, order))(floats)


def _jit(stack, wrap, floats, key, order):
    return _compiled(ft.partial(_value_and_grad, stack, wrap))(floats, key, order)


def _donated(stack, wrap, floats, key, order):
    def step(floats):
        gradient = jax.grad(lambda f: stack.loss(wrap, f, key, order))(floats)
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype) / 64, floats, gradient)

    copy = jax.tree.map(jnp.copy, floats)
    return _compiled(step, donate_argnums=0)(copy)


def _vmap(stack, wrap, floats, key, order):
    gradient = jax.grad(lambda f: stack.loss(wrap, f, key, order))
    return _compiled(jax.vmap(gradient))(jax.tree.map(lambda x: jnp.stack([x, x / 2]), floats))


def _jvp(stack, wrap, floats, key, order):
    f = lambda floats: stack.loss(wrap, floats, key, order)  # noqa: E731
    return _compiled(lambda f_: jax.jvp(f, (f_,), (f_,)))(floats)


def _linearize(stack, wrap, floats, key, order):
    f = lambda floats: stack.loss(wrap, floats, key, order)  # noqa: E731

    def both(floats):
        value, tangent = jax.linearize(f, floats)
        return value, tangent(floats)

    return _compiled(both)(floats)


def _hessian(stack, wrap, floats, key, order):
    """Forward over reverse: the Hessian times the point itself."""
    gradient = jax.grad(lambda floats: stack.loss(wrap, floats, key, order))
    return _compiled(lambda f: jax.jvp(gradient, (f,), (f,)))(floats)


def _scanned(stack, wrap, floats, key, order):
    ws, x = floats

    def loss(ws, x):
        step = lambda x, _: (stack.run(wrap, (ws, x), key, order)[0], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, None, length=2)[0].astype(jnp.float32))

    return _compiled(jax.grad(loss, (0, 1)))(ws, x)


def _checkpoint(stack, wrap, floats, key, order):
    f = jax.checkpoint(lambda floats: stack.loss(wrap, floats, key, order))
    return _compiled(jax.value_and_grad(f))(floats)


def _sharded(stack, wrap, floats, key, order):
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    columns = NamedSharding(mesh, PartitionSpec(None, "d"))
    last = lambda x: x.ndim == 2 and x.shape[1] % 8 == 0  # noqa: E731
    floats = jax.tree.map(
        lambda x: jax.device_put(x, columns if last(x) else NamedSharding(mesh, PartitionSpec())),
        floats,
    )
    return _compiled(jax.grad(lambda f: stack.loss(wrap, f, key, order)))(floats)


TRANSFORMATIONS = {
    f.__name__.strip("_"): f
    for f in (
        _jit, _donated, _vmap, _jvp, _linearize, _hessian, _scanned, _checkpoint, _sharded
    )
}  # fmt: skip
FORWARD_MODE = ("jvp", "linearize", "hessian")


@st.composite
def examples(draw):
    layers = draw(
        st.lists(
            st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=2).map(tuple),
            min_size=1,
            max_size=3,
        )
    )
    forms = draw(st.lists(st.sampled_from(FORMS), min_size=len(layers), max_size=len(layers)))
    stack = Stack(tuple(layers), tuple(forms), draw(st.booleans()))
    policy, isolation = draw(st.sampled_from(POLICIES)), draw(st.sampled_from(ISOLATIONS))
    transformation = draw(st.sampled_from(sorted(TRANSFORMATIONS)))
    used = {o for operations in layers for o in operations}
    if transformation in FORWARD_MODE and (policy in OFFLOADING or used & NO_FORWARD_MODE):
        transformation = "jit"
    if transformation == "vmap" and used & NO_BATCHED_PREDICATE:
        transformation = "jit"
    # The half precisions take a third run; one example in three.
    dtype = draw(st.sampled_from([jnp.float32] * 4 + [jnp.bfloat16, jnp.float16]))
    return stack, policy, isolation, transformation, dtype, draw(st.integers(0, 99))


def arrays(stack, dtype, seed):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, dtype)

    ws = [{"wi": array(D, F), "wo": array(F, D), "scale": array(D)} for _ in stack.layers]
    order = jnp.asarray(rng.permutation(T))
    return (ws, array(T, D)), jax.random.key(seed), order


@given(examples())
def test_random_stacks_are_the_plain_loop(example):
    """In float64 the numbers would be equal to rounding; here a chain of a few dozen operations, each
    rounded, of numbers of order 1, is compared with itself in another order."""
    stack, policy, isolation, transformation, dtype, seed = example
    wrap = checkpointed_layer(policy=_policy(policy), isolation=isolation)
    run = TRANSFORMATIONS[transformation]
    given_arrays = arrays(stack, dtype, seed)
    got, calls = _counted(run, stack, wrap, *given_arrays)
    want, plain_calls = _counted(run, stack, plain, *given_arrays)
    assert calls >= plain_calls  # what is recomputed calls again
    if dtype != jnp.float32:
        # XLA keeps excess precision inside fusions, which the boundary cuts differently: compare
        # both with the same program in float32 and ask that neither is much farther from it.
        wide = lambda t: jax.tree.map(_widen, t)  # noqa: E731
        exact = wide(run(stack, plain, *wide(given_arrays)))
        error = jax.tree.map(_distance, wide(want), exact)
        for g, e, x in zip(*(jax.tree.leaves(t) for t in (wide(got), error, exact)), strict=True):
            assert _distance(g, x) <= 4 * e + 0.1 * max(1.0, _size(x))
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    else:
        steps = sum(len(operations) for operations in stack.layers)
        assert_close(got, want, 64 * 2 * steps)


def _counted(run, *given):
    """The result, and how many calls of the host it took."""
    before = len(_CALLS)
    result = jax.block_until_ready(run(*given))
    jax.effects_barrier()
    return result, len(_CALLS) - before


def _widen(x):
    floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32) if floating else x


def _distance(a, b):
    if not jnp.issubdtype(b.dtype, jnp.floating):
        return 0.0
    return float(jnp.max(jnp.abs(a - b), initial=0))


def _size(x):
    return float(jnp.max(jnp.abs(x), initial=0)) if jnp.issubdtype(x.dtype, jnp.floating) else 0.0


# -- Faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_pass_through_where_they_are(value, isolation):
    """Only the row that they are in is touched, in the values and in the gradient."""

    def layer(x):
        return jnp.exp(x) * 2

    wrapped = checkpointed_layer(layer, isolation=isolation)
    x = jnp.ones((4, 3)).at[1, 2].set(value)
    got = wrapped(x), jax.grad(lambda x: wrapped(x).sum())(x)
    want = layer(x), jax.grad(lambda x: layer(x).sum())(x)
    assert_identical(got, want)
    assert np.isfinite(np.asarray(got[0])[[0, 2, 3]]).all()


def test_context_managers_are_unwound_by_an_exception():
    class OurError(Exception):
        pass

    @checkpointed_layer
    def layer(x):
        with jax.named_scope("inside"), jax.default_matmul_precision("float32"):
            raise OurError

    for _ in range(3):
        with pytest.raises(OurError):
            jax.jit(layer)(jnp.ones(2))
    assert jax.config.jax_default_matmul_precision is None
    text = jax.jit(lambda x: x + 1).lower(1.0).as_text(debug_info=True)
    assert "inside" not in text
    assert checkpointed_layer(lambda x: x + 1)(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_many_threads_trace_at_once():
    """Each its own layers: values, and the number of loops in each program, are its own."""
    results: dict[int, tuple] = {}
    start = threading.Barrier(8, timeout=60)

    def work(i):
        isolation = ISOLATIONS[i % 4]
        layer = checkpointed_layer(lambda x: jnp.sin(x) + i, isolation=isolation)

        def loss(x):
            for _ in range(i + 1):
                x = layer(x)
            return x.sum()

        start.wait()
        lowered = jax.jit(jax.grad(loss)).lower(jnp.ones(3))
        text = lowered.as_text()
        results[i] = float(loss(jnp.ones(3))), "skip-simplify" in text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(8):
        x = np.ones(3, np.float32)
        for _ in range(i + 1):
            x = np.sin(x) + i
        assert results[i][0] == pytest.approx(float(x.sum()), rel=1e-5)
        assert results[i][1] == (ISOLATIONS[i % 4] in ("loop", "both"))


def test_the_cache_of_layers_ends_with_them():
    def kept():
        jax.clear_caches()
        gc.collect()
        return len(trace_module._FLAT_LAYERS)

    before = kept()
    for i in range(50):
        checkpointed_layer(lambda x, i=i: x * i)(jnp.ones(2))
    assert kept() <= before + 1


def test_no_tracer_outlives_its_trace():
    """A layer that lives on, and read an array of one trace where it is not seen to be closed over."""
    kept = types.SimpleNamespace()
    held = []

    def layer(x):
        return jnp.sin(x) * kept.w

    @jax.jit
    def outer(w, x):
        kept.w = w * 2
        held.append(weakref.ref(kept.w))
        y = checkpointed_layer(layer)(x)
        del kept.w
        return y

    assert outer(1.5, jnp.ones(2)).tolist() == pytest.approx([3 * np.sin(1)] * 2)
    jax.clear_caches()
    gc.collect()
    assert held[0]() is None


def test_wrapping_and_unwrapping_a_thousand_times_leaks_nothing():
    x = jnp.ones(3)
    module = Module({"wi": jnp.ones((D, F))}, (_closure,))

    def layer(x):
        return jnp.sin(x)

    def once(i):
        fresh = lambda x: jnp.cos(x)  # noqa: E731
        for fn in (layer, fresh):
            wrapped = checkpointed_layer(fn)
            assert wrapped.__wrapped__ is fn
            if i % 10 == 0:
                jax.eval_shape(wrapped, x)
        assert checkpointed_layer(module).__wrapped__.w["wi"] is module.w["wi"]
        # Wrapping what is unwrapped again and again is wrapping once.
        assert checkpointed_layer(wrapped.__wrapped__).__wrapped__ is fresh

    def objects():
        jax.clear_caches()
        gc.collect()
        return len(gc.get_objects())

    for i in range(10):
        once(i)
    before = objects()
    for i in range(1000):
        once(i)
    assert objects() - before < 1000  # less than one object for each


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("policy", ["full", "minimal", "minimal_offloaded"])
def test_an_exception_points_at_the_users_line(isolation, policy):
    """Under transformations, too: unchanged, and its traceback ends where it was raised."""
    error = ValueError("shapes do not fit")

    def layer(x):
        if x.shape:
            raise error  # this line
        return x

    wrapped = checkpointed_layer(layer, policy=policy, isolation=isolation)
    loss = lambda x: wrapped(x).sum()  # noqa: E731
    scan = lambda x: jax.lax.scan(lambda c, _: (wrapped(c), None), x, None, length=2)  # noqa: E731
    for run in (
        wrapped,
        jax.jit(wrapped),
        jax.grad(loss),
        jax.jit(jax.grad(loss)),
        jax.vmap(loss),
        scan,
    ):
        with pytest.raises(ValueError, match="shapes do not fit") as caught:
            run(jnp.ones((2, 3)))
        assert caught.value is error
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (last.filename, last.line) == (__file__, "raise error  # this line")


# -- Canaries: switches of JAX that change what is underneath ----------------------------------------

CANARY = """
import jax, jax.numpy as jnp
import test_properties

globals().update(vars(test_properties))

examples = [
    Stack(((_mlp, _dropout), (_scan, _gated)), ("separate", "module"), False),
    Stack(((_custom_vjp, _cond), (_gather, _norm, _mlp)), ("keywords", "nested with None"), True),
]
DTYPE = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
for stack in examples:
    data = arrays(stack, DTYPE, 0)
    want = _jit(stack, plain, *data)
    for policy in ("full", "minimal", "minimal_offloaded"):
        for isolation in ("loop", "barrier"):
            got = _jit(stack, checkpointed_layer(policy=policy, isolation=isolation), *data)
            assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
            assert jax.tree.leaves(got)[0].dtype == DTYPE
            # The layers compute in float32 here and there.
            assert_close(*(jax.tree.map(_widen, t) for t in (got, want)), 1000)
print("same")
"""


@pytest.mark.parametrize("switch", ["JAX_ENABLE_X64", "JAX_REMAT3", "JAX_USE_SHARDY_PARTITIONER=0"])
def test_switches_of_jax(switch):
    name, _, value = switch.partition("=")
    here = Path(__file__).parent
    if not hasattr(jax.config, name.lower()):
        pytest.skip(f"this jax has no {name.lower()}")
    environment = {
        **os.environ,
        name: value or "1",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CANARY)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.stdout == "same\n", run.stderr[-3000:]
