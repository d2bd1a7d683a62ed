"""`blockwise` against the plain function, and what it does to the compiled program."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_scan import blockwise, checkpointed_layer, memory_report

B, T, D, F = 2, 11, 4, 8
ROUNDINGS = 64


def mlp(w, x):
    return jnp.tanh(x @ w) @ w.T


def w_and_x(dtype=jnp.float32):
    return normal(0, D, F, dtype=dtype), normal(1, B, T, D, dtype=dtype)


blocks_of = ft.partial(blockwise, axis=(None, 1), out=1)


def gradient(fn, jit=True):
    value_and_grad = jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), argnums=(0, 1))
    return jax.jit(value_and_grad) if jit else value_and_grad


TRANSFORMED = {
    "value": lambda f, w, x: f(w, x),
    "jit": lambda f, w, x: jax.jit(f)(w, x),
    "gradient": lambda f, w, x: gradient(f)(w, x),
    "jvp": lambda f, w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.cos(x))),
    "vmap": lambda f, w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])),
    "vmap of gradient": lambda f, w, x: jax.vmap(gradient(f), (None, 0))(w, jnp.stack([x, 2 * x])),
    "gradient of gradient": lambda f, w, x: jax.grad(
        lambda w: jnp.sum(jnp.sin(gradient(f)(w, x)[1][0]))
    )(w),
    "forward over reverse": lambda f, w, x: jax.jvp(
        lambda w: gradient(f)(w, x)[1], (w,), (jnp.cos(w),)
    ),
    "under checkpoint": lambda f, w, x: gradient(jax.checkpoint(f))(w, x),
    "in a layer": lambda f, w, x: gradient(checkpointed_layer(f))(w, x),
    "in a scan": lambda f, w, x: gradient(
        lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, length=2)[0]
    )(w, x),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformations(transform):
    w, x = w_and_x()
    assert_close(transform(blocks_of(mlp, size=4), w, x), transform(mlp, w, x), ROUNDINGS)


@pytest.mark.parametrize("size", [1, 5, 6, 10, 11, 100])
def test_sizes(size):
    w, x = w_and_x()
    assert_close(gradient(blocks_of(mlp, size=size))(w, x), gradient(mlp)(w, x), ROUNDINGS)


def test_several_results_and_sums():
    """Results along different axes, sums, a static result, and integers cut along."""

    def fn(x, labels, scale):
        h = jnp.tanh(x * scale)
        valid = labels >= 0
        loss = jnp.sum(h.sum(-1) * labels, where=valid)
        return {"h": h, "turned": h.T, "loss": (loss, jnp.sum(valid)), "name": "mlp"}

    x, scale = normal(0, T, D), normal(1, D)
    labels = jnp.arange(T) % 4 - 1
    out = {"h": 0, "turned": -1, "loss": "sum", "name": None}
    blocks = blockwise(fn, axis=(0, 0, None), size=4, out=out)
    got, want = (eqx.filter_jit(f)(x, labels, scale) for f in (blocks, fn))
    assert got["loss"][1].dtype == want["loss"][1].dtype == jnp.sum(labels > 0).dtype
    assert_close(got, want, ROUNDINGS)

    def loss(fn, x, scale):
        r = fn(x, labels, scale)
        return jnp.sum(r["h"] * r["turned"].T) + r["loss"][0] / r["loss"][1]

    grads = [jax.jit(jax.grad(ft.partial(loss, f), (0, 1)))(x, scale) for f in (blocks, fn)]
    assert_close(*grads, ROUNDINGS)


def test_arguments_as_pytrees():
    def fn(arrays, w, flag, *, scale):
        assert flag == "static"
        return {"y": arrays["a"] @ w * scale + arrays["both"]["b"].T, "z": arrays["both"]["c"]}

    arrays = {"a": normal(0, T, D), "both": {"b": normal(1, D, T), "c": normal(2, T)}}
    axis = ({"a": 0, "both": {"b": -1, "c": 0}}, None, None)
    args = (arrays, normal(3, D, D), "static")
    got, want = (
        eqx.filter_jit(f)(*args, scale=normal(4, D))
        for f in (blockwise(fn, axis=axis, out=0, size=3), fn)
    )
    assert_close(got, want, ROUNDINGS)


class Mlp(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        """A layer."""
        return mlp(self.w, x)


def test_weights_of_a_module_a_closure_a_keyword_a_partial_and_a_method():
    w, x = w_and_x()
    cut = ft.partial(blockwise, axis=1, size=4)
    ways = {
        "module": lambda w, x: cut(Mlp(w))(x),
        "method": lambda w, x: cut(Mlp(w).__call__)(x),
        "closure": lambda w, x: cut(lambda x: mlp(w, x))(x),
        "keyword": lambda w, x: cut(lambda x, *, w: mlp(w, x))(x, w=w),
        "partial": lambda w, x: cut(ft.partial(mlp, w))(x),
    }
    want = gradient(mlp)(w, x)
    for way in ways.values():
        assert_close(gradient(way)(w, x), want, ROUNDINGS)
    module = cut(Mlp(w))
    assert [a.shape for a in jax.tree.leaves(module)] == [w.shape]
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(jnp.sin(m(x)))))(module)
    assert_close(jax.tree.leaves(grads), [want[1][0]], ROUNDINGS)

    @cut
    def named(x):
        """What it does."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "What it does.")


@pytest.mark.parametrize("what", ["gradient", "sum"])
def test_bfloat16_is_added_up_in_float32(what):
    w, x = normal(0, D, dtype=jnp.bfloat16), normal(1, 512, D, dtype=jnp.bfloat16)

    def total(w, x):
        return jnp.sum((w * x).astype(jnp.float32) ** 2).astype(jnp.bfloat16)

    def run(fn):
        result = (jax.jit(jax.grad(fn)) if what == "gradient" else jax.jit(fn))(w, x)
        assert result.dtype == jnp.bfloat16
        return np.asarray(result, np.float64)

    exact = np.asarray(w, np.float64) ** 2 * np.asarray(x, np.float64) ** 2
    exact = exact.sum()
    if what == "gradient":
        exact = (2 * np.asarray(w, np.float64) * np.asarray(x, np.float64) ** 2).sum(0)
    blocks = ft.partial(blockwise, total, axis=(None, 0), out="sum", size=2)
    error = {
        accumulate: np.max(np.abs(run(blocks(accumulate=accumulate)) - exact) / np.abs(exact))
        for accumulate in ("float32", None)
    }
    assert error["float32"] < 1.5e-2  # a few roundings to bfloat16
    assert error["float32"] < error[None] / 4


def test_float64_is_not_narrowed():
    with jax.enable_x64(True):
        w, x = normal(0, D, F, dtype=jnp.float64), normal(1, B, T, D, dtype=jnp.float64)
        assert_close(gradient(blocks_of(mlp, size=4))(w, x), gradient(mlp)(w, x), ROUNDINGS)


def mesh(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


@pytest.mark.parametrize("size", [16, 24])
def test_a_split_axis_stays_where_it_is(size):
    w, x = normal(0, D, F), normal(1, B, 64, D)
    xs = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P(None, "data")))
    blocks = gradient(blocks_of(mlp, size=size, shards=8))
    assert_close(jax.device_get(blocks(w, xs)), jax.device_get(gradient(mlp)(w, x)), ROUNDINGS)
    text = blocks.lower(w, xs).compile().as_text()
    assert not re.findall(r"all-gather|all-to-all|collective-permute", text)
    # The same without `shards`: a block lies on one or two devices, and everything moves.
    moving = gradient(blocks_of(mlp, size=size)).lower(w, xs).compile().as_text()
    assert re.findall(r"all-gather|all-to-all|collective-permute", moving)


def test_explicit_sharding_needs_no_shards():
    w, x = normal(0, D, F), normal(1, B, 64, D)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        xs = jax.device_put(x, P(None, "data"))
        blocks = blocks_of(mlp, size=24)
        y = jax.jit(blocks)(w, xs)
        assert jax.typeof(y).sharding.spec[1] == "data"
        of_x = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(blocks(w, x)))))
        assert_close(jax.device_get(of_x(xs)), jax.device_get(gradient(mlp)(w, x)[1][1]), ROUNDINGS)
        text = of_x.lower(xs).compile().as_text()
        assert not re.findall(r"all-gather|all-to-all|collective-permute", text)
        with pytest.raises(ValueError, match="multiples of the 8 shards"):
            blocks_of(mlp, size=12)(w, xs)
    assert_close(jax.device_get(y), jax.device_get(mlp(w, x)), ROUNDINGS)


def test_inside_shard_map():
    w, x = normal(0, D, F), normal(1, B, 64, D)
    specs = {"in_specs": (P(), P(None, "data")), "out_specs": P(None, "data")}
    blocks = jax.shard_map(blocks_of(mlp, size=3), mesh=mesh(AxisType.Auto), **specs)
    assert_close(jax.device_get(gradient(blocks)(w, x)), jax.device_get(gradient(mlp)(w, x)), 64)


def cross_entropy(table, h, labels):
    logits = h @ table.T
    return jnp.sum(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels, -1)[:, 0])


def test_memory_is_that_of_a_block():
    vocabulary, tokens = 1024, 512
    table, h = normal(0, vocabulary, D), normal(1, tokens, D)
    labels = jnp.arange(tokens)[:, None]
    loss = blockwise(cross_entropy, axis=(None, 0, 0), out="sum", size=32)

    def compiled(fn):
        return jax.jit(jax.value_and_grad(fn, (0, 1))).lower(table, h, labels).compile()

    plain, blocks = compiled(cross_entropy), compiled(loss)
    temporaries = [c.memory_analysis().temp_size_in_bytes for c in (plain, blocks)]
    assert temporaries[1] < temporaries[0] / 4
    got, want = (c(table, h, labels) for c in (blocks, plain))
    assert_close(got, want, 4 * ROUNDINGS)

    w, x = normal(0, D, 64 * D), normal(1, B, 512, D)
    plain, blocks = (
        gradient(f).lower(w, x).compile().memory_analysis().temp_size_in_bytes
        for f in (mlp, blocks_of(mlp, size=32))
    )
    assert blocks < plain / 4


@pytest.mark.parametrize("size", [16, 24])
def test_costs_no_flops_inside_a_layer(size):
    """The blocks come last in the layer: recomputing it does not run them again."""
    w, x = normal(0, D, F), normal(1, B, 64, D)

    def layer(tail, v, w, x):
        return tail(w, x + jnp.tanh(x @ v))

    def flops(tail):
        wrapped = checkpointed_layer(ft.partial(layer, tail))
        value_and_grad = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(wrapped(*a))), (0, 1, 2))
        return memory_report(value_and_grad, normal(2, D, D), w, x, target="cpu").flops

    want = flops(mlp)
    assert want > 0
    assert flops(blocks_of(mlp, size=size)) <= 1.01 * want


def test_errors():
    w, x = w_and_x()
    for size in (0, -1, True):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            blockwise(mlp, axis=0, size=size)
    for shards in (0, 3):
        with pytest.raises(ValueError, match="must be a multiple of shards"):
            blockwise(mlp, axis=0, size=4, shards=shards)
    with pytest.raises(TypeError):
        blockwise(3, axis=0, size=4)

    def call(message, *args, fn=mlp, size=4, **options):
        with pytest.raises(ValueError, match=re.escape(message)):
            blockwise(fn, size=size, **options)(*args)

    call("blockwise(mlp): an argument of shape (4, 8) has no axis 2", w, x, axis=2)
    call("an argument of shape (2, 11, 4) has no axis -4", w, x, axis=(None, -4))
    call("have the lengths [4, 11]", w, x, axis=(0, 1))
    call("must be one entry, or a pytree prefix of the arguments", w, x, axis=(0,))
    call("must consist of whole numbers and None", w, x, axis=(None, "1"))
    call("cuts no array of 2 positional argument(s)", w, x, axis=(None, None))
    call(
        "the length 11 and size=4 must be multiples of the 2 shards", w, x, axis=(None, 1), shards=2
    )
    call("cut along different axes", w, x, axis=(0, 2), fn=lambda w, x: w, size=2)
    axis = (None, 1)
    call("gave a result of shape (2,), which has 2 along axis 0", w, x, axis=axis, out=0,
         fn=lambda w, x: x.sum((1, 2)))  # fmt: skip
    call("a result of shape () has no axis 1", w, x, axis=axis, fn=lambda w, x: x.sum())
    call('out=(1, None) must consist of axes and "sum"', w, x, axis=axis, out=(1, None),
         fn=lambda w, x: (x, x))  # fmt: skip
    call("must be one entry, or a pytree prefix of the results", w, x, axis=axis, out=(1, 1))
    call("of dtype bool cannot be summed", w, x, axis=axis, out="sum",
         fn=lambda w, x: jnp.any(x > 0))  # fmt: skip

    def raises(x):
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        blockwise(raises, axis=0, size=4)(x)


@settings(max_examples=25)
@given(st.data())
def test_any_function_of_tokens(data):
    ndim = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(-ndim, ndim - 1))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
    shards = data.draw(st.sampled_from([None, 1, 2]))
    per_block, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    shape[axis] = blocks * (shards or 1)
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.float16, jnp.int32]))
    x = normal(0, *shape)
    y = (4 * normal(1, *shape)).astype(dtype)
    out = data.draw(st.sampled_from([None, axis, (axis, "sum")]))

    def fn(x, y, scale):
        z = jnp.sin(x * scale) * y.astype(x.dtype)
        return (z, jnp.sum(z * x)) if isinstance(out, tuple) else (z, y)

    wrapped = blockwise(
        fn, axis=(axis, axis, None), out=out, size=per_block * (shards or 1), shards=shards
    )

    def run(fn):
        def loss(x, scale):
            results = fn(x, y, scale)
            return sum(jnp.sum(jnp.sin(r.astype(jnp.float32))) for r in results), results

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, jnp.float32(0.7))

    assert_close(run(wrapped), run(fn), 256)
