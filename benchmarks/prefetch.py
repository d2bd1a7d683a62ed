"""Layer inputs that come back from the host so many layers before they are needed.

The library copies an input back in the backward pass of its own layer: a distance of 0. With `d`, the
copy of layer i's input is made in the backward pass of layer i + d, so that it can run beside `d`
layers' compute; `d` inputs more are then on the device, and those of the last `d` layers never leave.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax

from remat_scan._isolation import isolate
from remat_scan._offload import _flat_program

from .stack import ACTIVATIONS, Stack, gated_mlp, sgd_step

DISTANCES = (0, 1, 2)


def program(stack: Stack, isolation: str, distance: int) -> tuple[Callable[..., Any], Any, Any]:
    """`(step, weights, x)`: the step of `Stack.step`, everything recomputed, inputs on the host."""
    layer = ft.partial(gated_mlp, ACTIVATIONS[stack.activation])
    step = sgd_step(prefetched(layer, isolation, distance))
    _, weights, x = stack.program("no remat")
    return jax.jit(step, donate_argnums=0), weights, x


def prefetched(layer: Callable[..., jax.Array], isolation: str, distance: int) -> Any:
    """`for w in weights: x = layer(w, x)`, for a list of weights, as one differentiable function."""

    def apart(fn: Callable[..., Any], weights: Any, *streams: Any) -> Any:
        """`fn(weights, *streams)` behind the boundary; no memory kinds change but in `fn`."""
        flat, treedef = jax.tree.flatten((weights, *streams))
        out_treedef: Any = None  # known when `flat_fn` has been traced

        def flat_fn(*flat: Any) -> list[Any]:
            nonlocal out_treedef
            outputs, out_treedef = jax.tree.flatten(fn(*jax.tree.unflatten(treedef, flat)))
            return outputs

        run, in_types, out_types = _flat_program(flat_fn, flat)
        count = len(jax.tree.leaves(weights))
        results = isolate(run, in_types, out_types, count, isolation)(*flat)
        return jax.tree.unflatten(out_treedef, results)

    @jax.custom_vjp
    def run(weights: Any, x: jax.Array) -> jax.Array:
        return forward(weights, x)[0]

    def forward(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        kept = []
        for i, w in enumerate(weights):
            before, x = x, apart(layer, w, x)
            if i < len(weights) - distance:
                before = jax.device_put(before, jax.memory.Space.Host)
                x, before = jax.lax.optimization_barrier((x, before))
            kept.append(before)
        return x, (weights, kept)

    def backward(residuals: Any, ct: jax.Array) -> Any:
        weights, kept = residuals

        def body(operands: Any, ct: jax.Array) -> Any:
            w, x, host = operands
            fetched = jax.device_put(host, jax.memory.Space.Device)
            if x is None:
                x, fetched = fetched, None
            grads, ct = jax.vjp(layer, w, x)[1](ct)
            return ct, grads, fetched

        kept, gradients = list(kept), []
        for i in reversed(range(len(weights))):
            source = i - distance
            operands = (
                weights[i],
                kept[i] if distance else None,
                kept[source] if source >= 0 else None,
            )
            ct, grads, fetched = apart(body, operands, ct)
            if isolation == "barrier":
                ct, grads, fetched = jax.lax.optimization_barrier((ct, grads, fetched))
            if fetched is not None:
                kept[source] = fetched
            gradients.append(grads)
        return gradients[::-1], ct

    run.defvjp(forward, backward)
    return run
