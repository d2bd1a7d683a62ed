"""Layers of many kinds for tests of stacks, and the oracle: the plain Python loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
from helpers import D, F, assert_close, gated_mlp, loss_of, mlp, normal, weights

from remat_scan import StackLayer, run_stack, unstack_layers


class Mlp(eqx.Module):
    w: dict[str, jax.Array]
    traces: list[int] = eqx.field(static=True, default_factory=list)

    def __call__(self, x, *own, key=None, **read):
        self.traces.append(1)
        x = mlp(self.w, x)
        for value in (*own, *read.values()):
            x = x + 0.3 * value
        return x if key is None else x + 0.1 * jax.random.normal(key, x.shape, x.dtype)


class Writer(Mlp):
    """Returns a value for others, and a statistic, after the stream."""

    def __call__(self, x, *own, key=None, **read):
        y = super().__call__(x, *own, key=key, **read)
        return y, jnp.sin(y), y.mean()


class Wide(Mlp):
    """Another shape of weights, so unlike `Mlp` in every way."""

    def __call__(self, x, *own, key=None, **read):
        return super().__call__(gated_mlp(self.w, x), *own, key=key, **read)


TRACES = []  # one list, because a static field is part of what makes layers alike


def make(kind, seed):
    w = {name: a / 2 for name, a in weights(jnp.float32, seed).items()}
    if kind == "wide":
        return StackLayer(Wide({**w, "wg": normal(seed, D, F) / 4}, TRACES))
    if kind == "writer":
        return StackLayer(Writer(w, TRACES), writes="v", collects="mean")
    if kind == "reader":
        return StackLayer(Mlp(w, TRACES), reads=("v",), name="reader")
    if kind == "both":
        return StackLayer(Writer(w, TRACES), reads={"other": "v"}, writes="v", collects="mean")
    return Mlp(w, TRACES)


def loop(layers, x, *args, per_layer=None, values=None, key=None):
    """The oracle: `run_stack`'s docstring without checkpoints."""
    values, collected = dict(values or {}), {}
    for i, layer in enumerate(layers):
        layer = layer if isinstance(layer, StackLayer) else StackLayer(layer)
        if per_layer is None:
            own = ()
        elif isinstance(per_layer, list):
            own = (per_layer[i],)
        else:
            own = (jax.tree.map(lambda a: a[i], per_layer),)
        named = {keyword: values[name] for keyword, name in layer.reads}
        if key is not None:
            named["key"] = jax.random.fold_in(key, i)
        out = layer.fn(x, *own, *args, **named)
        x, *more = out if layer.writes or layer.collects else (out,)
        for name in layer.writes:
            values[name] = more.pop(0)
        for name in layer.collects:
            collected.setdefault(name, {})[i] = more.pop(0)
    return x, values, collected


def roundings(layers):
    return 40 * len(layers)


def check(layers, x, *args, stack=None, atol=None, **options):
    """Results and gradients of `run_stack` and of the loop; `stack` may be stored otherwise."""
    ours = ("policy", "isolation", "boundary", "overlap", "schedule")
    data = {k: v for k, v in options.items() if k not in ours}
    run = lambda s, x: run_stack(s, x, *args, **options)  # noqa: E731
    stack = layers if stack is None else stack
    want = loop(layers, x, *args, **data)
    got = eqx.filter_jit(run)(stack, x)
    assert_close(tuple(got), want, roundings(layers))

    def gradient(run, stack):
        floats, rest = eqx.partition((stack, x), eqx.is_inexact_array)
        loss = loss_of(lambda floats: tuple(run(*eqx.combine(floats, rest))))
        return jax.jit(jax.grad(loss))(floats)

    got, got_x = gradient(run, stack)
    want, want_x = gradient(lambda s, x: loop(s, x, *args, **data), layers)
    assert_close(unstack_layers(got), want, 4 * roundings(layers))
    assert_close(got_x, want_x, 4 * roundings(layers))


PATTERN = ["mlp", "writer", "reader"]


def repeated(count=2, rest=("wide", "reader")):
    kinds = PATTERN * count + list(rest)
    return [make(kind, seed) for seed, kind in enumerate(kinds)]
