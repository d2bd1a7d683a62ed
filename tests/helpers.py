"""Tables of layers, policies and isolations, and the oracle: the plain Python call.

A `Case` says how one layer is used, given something that wraps it: `case.run(wrap, arrays)`. With
`wrap = lambda fn: fn` it is the oracle.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from remat_scan import Policy

D, F, T = 4, 6, 3  # width, hidden width, tokens: unlike one another, so that shapes tell them apart


@dataclasses.dataclass(frozen=True)
class Case:
    """One use of one layer."""

    run: Callable[[Callable[..., Any], Any], Any]  # (wrap, arrays) -> results
    arrays: Any  # what is differentiated, and what is only passed
    # The longest chain of roundings from an input to a result, for tolerances: each elementwise
    # operation is one; a matrix product is one in bfloat16 (XLA accumulates in float32), and as
    # many as it sums in float32.
    elementwise: int = 8
    summed: int = 2 * F

    def roundings(self, dtype: Any) -> int:
        return self.elementwise + (self.summed if dtype == jnp.float32 else 0)


LAYERS: dict[str, Callable[[Any], Case]] = {}


def layer(make: Callable[[Any], Case]) -> Callable[[Any], Case]:
    LAYERS[make.__name__] = make
    return make


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def weights(dtype: Any, seed: int = 0) -> dict[str, jax.Array]:
    return {
        "wi": normal(seed, D, F, dtype=dtype) / 2,
        "wo": normal(seed + 1, F, D, dtype=dtype) / 2,
    }


def stream(dtype: Any, seed: int = 9) -> jax.Array:
    return normal(seed, T, D, dtype=dtype)


def mlp(w: Any, x: jax.Array) -> jax.Array:
    h = checkpoint_name(x @ w["wi"], "mlpwi")
    return x + checkpoint_name(jnp.tanh(h) @ w["wo"], "mlpwo")


def gated_mlp(w: Any, x: jax.Array) -> jax.Array:
    a = checkpoint_name(x @ w["wi"], "mlpwi_0")
    b = checkpoint_name(x @ w["wg"], "mlpwi_1")
    return x + checkpoint_name((jax.nn.silu(a) * b) @ w["wo"], "mlpwo")


def attention(w: Any, x: jax.Array, *, window: int | None = None) -> jax.Array:
    """Causal attention with one head, every tensor tagged with the name that policies know."""
    q = checkpoint_name(x @ w["q"], "query_proj")
    k = checkpoint_name(x @ w["k"], "key_proj")
    v = checkpoint_name(x @ w["v"], "value_proj")
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[0])[None, :]
    mask = (j <= i) if window is None else (j <= i) & (i - j < window)
    scores = jnp.where(mask, q @ k.T, jnp.asarray(-1e9, q.dtype))
    context = checkpoint_name(jax.nn.softmax(scores) @ v, "context")
    return x + checkpoint_name(context @ w["o"], "out_proj")


def attention_weights(dtype: Any) -> dict[str, jax.Array]:
    return {n: normal(i, D, D, dtype=dtype) / 2 for i, n in enumerate("qkvo")}


def transformer_block(w: Any, x: jax.Array) -> jax.Array:
    """All of the named tensors of a decoder layer."""
    x = attention(w["attention"], x)
    return gated_mlp(w["mlp"], x)


def block_weights(dtype: Any) -> dict[str, Any]:
    return {
        "attention": attention_weights(dtype),
        "mlp": {**weights(dtype, 5), "wg": normal(7, D, F, dtype=dtype) / 2},
    }


@layer
def dict_weights(dtype):
    return Case(lambda wrap, a: wrap(mlp)(*a), (weights(dtype), stream(dtype)))


@layer
def gated(dtype):
    w = {**weights(dtype), "wg": normal(2, D, F, dtype=dtype) / 2}
    return Case(lambda wrap, a: wrap(gated_mlp)(*a), (w, stream(dtype)), 10)


@layer
def full_attention(dtype):
    return Case(
        lambda wrap, a: wrap(attention)(*a), (attention_weights(dtype), stream(dtype)), 16, 4 * D
    )


@layer
def sliding_attention(dtype):
    return Case(
        lambda wrap, a: wrap(attention)(*a, window=2),
        (attention_weights(dtype), stream(dtype)),
        16,
        4 * D,
    )


@layer
def stack_of_three(dtype):
    """Three layers in a row, the middle one shared with the last."""

    def run(wrap, a):
        w, v, x = a
        layer = wrap(mlp)
        return layer(v, layer(v, layer(w, x)))

    return Case(run, (weights(dtype), weights(dtype, 4), stream(dtype)), 24, 6 * F)


@layer
def aux_outputs(dtype):
    def fn(w, x):
        y = mlp(w, x)
        return {"stream": y, "norms": (jnp.abs(y).max(-1), y.sum()), "copy": x, "none": None}

    return Case(lambda wrap, a: wrap(fn)(*a), (weights(dtype), stream(dtype)), 10, 2 * F + T * D)


@layer
def static_keywords(dtype):
    def fn(w, x, *, act, flip=False, power=1):
        h = act(x @ w["wi"]) ** power @ w["wo"]
        return -h if flip else h

    def run(wrap, a):
        return wrap(fn)(*a, act=jnp.sin, flip=True, power=2)

    return Case(run, (weights(dtype), stream(dtype)), 10)


@layer
def keyword_named_like_ours(dtype):
    def fn(x, *, fn, policy, isolation, self, args, kwargs):
        return x * fn + policy * isolation - self * args / kwargs

    def run(wrap, a):
        return wrap(fn)(a, fn=a, policy=2.0, isolation=a, self=a, args=3.0, kwargs=4.0)

    return Case(run, stream(dtype))


@layer
def none_in_and_out(dtype):
    def fn(w, x, mask=None):
        assert mask is None
        return None, mlp(w, x)

    return Case(lambda wrap, a: wrap(fn)(*a, None), (weights(dtype), stream(dtype)))


@layer
def integers_and_booleans(dtype):
    def fn(x, index, keep):
        y = jnp.where(keep[:, None], jnp.sin(x), 0)[index]
        return y, index + 1, ~keep, y > 0

    index, keep = jnp.array([2, 0, 1]), jnp.array([True, False, True])
    return Case(lambda wrap, a: wrap(fn)(*a), (stream(dtype), index, keep))


@layer
def typed_key(dtype):
    def fn(x, key):
        key, mine = jax.random.split(key)
        return x * jax.random.bernoulli(mine, 0.5, x.shape), key

    return Case(lambda wrap, a: wrap(fn)(*a), (stream(dtype), jax.random.key(1)))


@layer
def legacy_key(dtype):
    def fn(x, key):
        key, mine = jax.random.split(key)
        return x * jax.random.bernoulli(mine, 0.5, x.shape), key

    return Case(lambda wrap, a: wrap(fn)(*a), (stream(dtype), jax.random.PRNGKey(1)))


@layer
def batch_of_keys(dtype):
    def fn(x, keys):
        return x + jax.vmap(lambda k: jax.random.normal(k, (D,), x.dtype))(keys), keys[::-1]

    return Case(
        lambda wrap, a: wrap(fn)(*a), (stream(dtype), jax.random.split(jax.random.key(2), T))
    )


@layer
def zero_sized(dtype):
    def fn(x, empty):
        return jnp.concatenate([x, empty]), empty * 2

    return Case(lambda wrap, a: wrap(fn)(*a), (stream(dtype), jnp.zeros((0, D), dtype)))


@layer
def scalars(dtype):
    def fn(x, scale, shift):
        return x * scale + shift, scale

    return Case(
        lambda wrap, a: wrap(fn)(a[0], a[1], np.float32(2.0)),
        (stream(dtype), jnp.asarray(0.5, dtype)),
    )


@layer
def closure(dtype):
    def run(wrap, a):
        w, x = a
        table = np.arange(T)  # a NumPy array, closed over

        def fn(x):
            return mlp(w, x)[table]

        return wrap(fn)(x)

    return Case(run, (weights(dtype), stream(dtype)))


@layer
def rebound_closure(dtype):
    """The loop that everybody writes: the layer closes over the loop variable."""

    def run(wrap, a):
        ws, x = a
        w = None

        def fn(x):
            return mlp(w, x)

        layer = wrap(fn)
        for w in ws:  # noqa: B007
            x = layer(x)
        return x

    return Case(run, ([weights(dtype, s) for s in (0, 2)], stream(dtype)), 16, 4 * F)


@layer
def numpy_arrays(dtype):
    def fn(x, scale, order):
        return (x * scale)[order]

    def run(wrap, a):
        return wrap(fn)(a, np.full((T, 1), 0.5, dtype), np.array([1, 2, 0]))

    return Case(run, stream(dtype))


class Block(eqx.Module):
    """A layer as an Equinox module, with a static field, a static leaf and a nested module."""

    wi: jax.Array
    norm: eqx.nn.RMSNorm
    wo: jax.Array
    act: Callable[..., Any]
    scale: float = eqx.field(static=True)

    def __init__(self, dtype: Any, seed: int = 0) -> None:
        self.wi, self.wo = weights(dtype, seed).values()
        self.norm = eqx.nn.RMSNorm(D, dtype=dtype)
        self.act = jnp.tanh
        self.scale = 0.5

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Adds an MLP's output to `x`."""
        del key
        h = checkpoint_name(jax.vmap(self.norm)(x).astype(x.dtype) @ self.wi, "mlpwi")
        return x + self.scale * checkpoint_name(self.act(h) @ self.wo, "mlpwo")


@layer
def equinox_module(dtype):
    return Case(lambda wrap, a: wrap(a[0])(a[1]), (Block(dtype), stream(dtype)), 16, 2 * F + 2 * D)


@layer
def bound_method(dtype):
    return Case(
        lambda wrap, a: wrap(a[0].__call__)(a[1], key=None),
        (Block(dtype), stream(dtype)),
        16,
        2 * F + 2 * D,
    )


@layer
def method_of_plain_object(dtype):
    class Plain:
        def __init__(self, w):
            self.w = w

        def layer(self, x):
            return mlp(self.w, x)

    return Case(lambda wrap, a: wrap(Plain(a[0]).layer)(a[1]), (weights(dtype), stream(dtype)))


@layer
def partial(dtype):
    def run(wrap, a):
        w, x = a
        return wrap(ft.partial(ft.partial(attention, w), window=2))(x)

    return Case(run, (attention_weights(dtype), stream(dtype)), 16, 4 * D)


@layer
def tree_partial(dtype):
    def run(wrap, a):
        w, x = a
        return wrap(jax.tree_util.Partial(mlp, w))(x)

    return Case(run, (weights(dtype), stream(dtype)))


@layer
def jitted(dtype):
    return Case(lambda wrap, a: wrap(jax.jit(mlp))(*a), (weights(dtype), stream(dtype)))


@layer
def inner_scan(dtype):
    def fn(w, x):
        return jax.lax.scan(lambda c, _: (mlp(w, c), c.sum()), x, None, length=2)

    return Case(lambda wrap, a: wrap(fn)(*a), (weights(dtype), stream(dtype)), 18, 4 * F + T * D)


@layer
def inner_while(dtype):
    """`while_loop` has no reverse mode; behind `stop_gradient` it needs none."""

    def fn(x):
        start = jax.lax.stop_gradient(x)
        y = jax.lax.while_loop(lambda y: jnp.abs(y).max() > 0.1, lambda y: y / 2, start)
        return jnp.sin(x) + y

    return Case(lambda wrap, a: wrap(fn)(a), stream(dtype), 10)


@layer
def inner_cond(dtype):
    def fn(w, x, flag):
        return jax.lax.cond(flag, lambda: mlp(w, x), lambda: -x)

    return Case(lambda wrap, a: wrap(fn)(*a), (weights(dtype), stream(dtype), jnp.array(True)))


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


@layer
def inner_custom_vjp(dtype):
    def fn(x, n):
        return doubled_gradient(x * n)

    return Case(lambda wrap, a: wrap(fn)(a, 2), stream(dtype))


@jax.custom_jvp
def tripled_tangent(x):
    return jnp.sin(x)


tripled_tangent.defjvp(lambda p, t: (jnp.sin(p[0]), 3 * t[0] * jnp.cos(p[0])))


@layer
def inner_custom_jvp(dtype):
    return Case(lambda wrap, a: wrap(lambda x: tripled_tangent(x) * x)(a), stream(dtype))


@layer
def stop_gradient(dtype):
    def fn(w, x):
        return mlp(jax.lax.stop_gradient(w), x)

    return Case(lambda wrap, a: wrap(fn)(*a), (weights(dtype), stream(dtype)))


@layer
def static_results(dtype):
    def fn(x, name):
        return {"x": jnp.sin(x), "name": name, "kind": ("tanh", 3, 2.5, jnp.sin), "flag": True}

    return Case(lambda wrap, a: wrap(fn)(a, "layer 3"), stream(dtype))


@layer
def weight_used_twice(dtype):
    def fn(w, also_w, x):
        return (x @ w["wi"]) @ also_w["wo"] + x @ (w["wi"] @ w["wo"])

    def run(wrap, a):
        w, x = a
        return wrap(fn)(w, w, x)

    return Case(run, (weights(dtype), stream(dtype)), 8, 4 * F)


@layer
def weight_shaped_like_stream(dtype):
    """What a matcher of carries may confuse: everything has the same type, and results are swapped."""

    def fn(w, x, y):
        return y * w, x + w, w

    arrays = tuple(normal(s, T, D, dtype=dtype) for s in range(3))
    return Case(lambda wrap, a: wrap(fn)(*a), arrays)


@layer
def swapped(dtype):
    return Case(lambda wrap, a: wrap(lambda x, y: (y, x))(*a), (stream(dtype), stream(dtype, 3)))


@layer
def identity(dtype):
    return Case(lambda wrap, a: wrap(lambda x: x)(a), stream(dtype))


@layer
def unused_argument(dtype):
    return Case(
        lambda wrap, a: wrap(lambda x, y: jnp.sin(x))(*a), (stream(dtype), stream(dtype, 3))
    )


@layer
def result_twice(dtype):
    def fn(x):
        y = jnp.sin(x)
        return y, y, x, x

    return Case(lambda wrap, a: wrap(fn)(a), stream(dtype))


@layer
def constant_results(dtype):
    def fn(x):
        return jnp.sin(x), jnp.arange(3), np.ones(2, np.float32), jnp.asarray(2.0)

    return Case(lambda wrap, a: wrap(fn)(a), stream(dtype))


@layer
def changes_type(dtype):
    def fn(w, x):
        h = x @ w["wi"]
        return h.astype(jnp.float16), (h[:, :1] > 0).astype(jnp.int32)

    return Case(lambda wrap, a: wrap(fn)(*a), (weights(dtype), stream(dtype)))


@layer
def complex_numbers(dtype):
    def fn(x):
        z = jnp.fft.fft(x.astype(jnp.float32), axis=-1)
        return jnp.abs(z * jnp.exp(1j * z.real)), z

    return Case(lambda wrap, a: wrap(fn)(a), stream(dtype), 16, 4 * D)


@layer
def many_arguments(dtype):
    def fn(*xs, **more):
        return sum(xs) + sum(more.values()), xs[::-1]

    def run(wrap, a):
        return wrap(fn)(*a, **{f"k{i}": x for i, x in enumerate(a)})

    return Case(run, [normal(s, 2, dtype=dtype) for s in range(40)], 80)


@layer
def nested_wrapping(dtype):
    def run(wrap, a):
        w, x = a
        inner = wrap(mlp)
        return wrap(lambda w, x: inner(w, inner(w, x)))(w, x)

    return Case(run, (weights(dtype), stream(dtype)), 16, 4 * F)


@layer
def recursive(dtype):
    def run(wrap, a):
        def fn(depth, x):
            return x if depth == 0 else wrapped(depth - 1, jnp.sin(x))

        wrapped = wrap(fn)
        return wrapped(3, a)

    return Case(run, stream(dtype))


@layer
def inside_jax_checkpoint(dtype):
    def run(wrap, a):
        return jax.checkpoint(lambda w, x: wrap(mlp)(w, x))(*a)

    return Case(run, (weights(dtype), stream(dtype)))


# -- Policies and isolations ---------------------------------------------------------------------

ISOLATIONS = ("loop", "barrier", "both", "none")

OFFLOADING = ("minimal_offloaded", "qkv_proj_offloaded", "offload_dot_with_no_batch_dims")

NAMED_POLICIES = (
    "none",
    "full",
    "custom",
    "minimal",
    "minimal_with_context",
    "save_qkv_proj",
    "save_out_proj",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)

POLICIES: dict[str, Any] = {
    **{name: name for name in NAMED_POLICIES},
    "None": None,
    "Policy(save)": Policy(save=("mlpwi*", "context"), recompute=("mlpwi_1",)),
    "Policy(save|dots)": Policy(save=("mlpwo",), unnamed="dots"),
    "mapping": {"mlpwo": "device", "query_proj": "remat"},
    "jax: everything": jax.checkpoint_policies.everything_saveable,
    "jax: dots": jax.checkpoint_policies.checkpoint_dots,
    "jax: names": jax.checkpoint_policies.save_only_these_names("mlpwo", "out_proj"),
    "jax: all but names": jax.checkpoint_policies.save_any_names_but_these("mlpwi"),
}


# -- The oracle ----------------------------------------------------------------------------------


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def loss_of(run: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
    """A scalar to which every floating-point number in the results contributes differently."""

    def loss(arrays: Any) -> jax.Array:
        total = jnp.zeros(())
        for i, leaf in enumerate(jax.tree.leaves(run(arrays))):
            if eqx.is_inexact_array(leaf):
                real = jnp.concatenate([leaf.real.ravel(), leaf.imag.ravel()]).astype(jnp.float32)
                total += jnp.sum(real * jnp.cos(jnp.arange(real.size) + i))
        return total

    return loss


def results(case: Case, wrap: Callable[..., Any]) -> Any:
    return case.run(wrap, case.arrays)


def gradients(case: Case, wrap: Callable[..., Any], *, jit: bool = True) -> Any:
    """The gradient of `loss_of`, for all floating-point arrays of the case."""
    floats, rest = eqx.partition(case.arrays, eqx.is_inexact_array)
    loss = loss_of(lambda floats: case.run(wrap, eqx.combine(floats, rest)))
    gradient = jax.grad(loss)
    return (jax.jit(gradient) if jit else gradient)(floats)


def bits(tree: Any) -> list[Any]:
    """Leaves as NumPy arrays, keys as their data, and everything else as it is."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x) if isinstance(x, jax.Array | np.ndarray | np.generic) else x

    return [one(x) for x in jax.tree.leaves(tree)]


def assert_identical(got: Any, want: Any) -> None:
    """The same tree, types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(bits(got), bits(want), strict=True):
        if isinstance(w, np.ndarray):
            assert g.dtype == w.dtype
            assert g.shape == w.shape
            assert g.tobytes() == w.tobytes()
        else:
            assert type(g) is type(w)
            assert g == w


def assert_close(got: Any, want: Any, roundings: int) -> None:
    """The same tree and types, and numbers as near as `roundings` roundings on either side allow.

    A result after n roundings, in whatever order, is within n·u of the exact one, relative to the
    largest number that takes part; u is half the machine epsilon. Two such results differ by twice
    that. The largest number of the array stands for the largest that takes part, times 4 for what
    cancels on the way: all arrays here are of order 1.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(bits(got), bits(want), strict=True):
        if not (isinstance(w, np.ndarray) and jnp.issubdtype(w.dtype, jnp.inexact)):
            assert_identical(g, w)
            continue
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        if w.size:
            wide = np.complex128 if np.iscomplexobj(w) else np.float64
            atol = 4 * roundings * float(jnp.finfo(w.dtype).eps) * max(1.0, float(abs(w).max()))
            np.testing.assert_allclose(g.astype(wide), w.astype(wide), rtol=0, atol=atol)
