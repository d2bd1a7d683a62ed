"""`checkpointed_layer` and `isolated_scan`: a layer behind a boundary that XLA's scheduler respects."""

import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name

from ._isolation import Flat, Isolation, check_isolation, isolate, streams
from ._offload import offloading_layer
from ._policies import LAYER_INPUT, Policy, PolicyLike, resolve
from ._trace import Program, trace

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpointed_layer(
    fn: Callable[P, R], /, *, policy: PolicyLike = "full", isolation: Isolation = "loop"
) -> Callable[P, R]: ...
@overload
def checkpointed_layer(
    fn: None = None, /, *, policy: PolicyLike = "full", isolation: Isolation = "loop"
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkpointed_layer(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    policy: PolicyLike = "full",
    isolation: Isolation = "loop",
) -> Callable[..., Any]:
    """Checkpoints a layer such that XLA keeps only one layer's working set alive at a time.

    `jax.checkpoint` decides *what* the backward pass recomputes, but not *when*: in a long unrolled
    stack XLA may put off the weight gradients of many layers, and everything that they read stays
    alive. Here each layer also becomes a unit that the scheduler does not mix with its neighbours.
    The values are those of

    ```python
    def checkpointed_layer(fn, policy, isolation):
        def wrapped(*args, **kwargs):
            return isolated(jax.checkpoint(fn, policy=policy))(*args, **kwargs)
        return wrapped
    ```

    in which `isolated` changes no value. Use it as a bare decorator, a decorator with options, or a
    call, on functions, methods, `functools.partial`s and Equinox modules:

    ```python
    @checkpointed_layer
    def layer(weights, x): ...

    @checkpointed_layer(policy="save_qkv_proj", isolation="barrier")
    def layer(weights, x, *, causal=True): ...

    x = checkpointed_layer(block)(x)  # block: an equinox.Module
    ```

    Arguments and results are any pytrees. Arrays are traced, including the ones inside `fn` and the
    ones that it closes over; everything else is static, as in `equinox.filter_jit`. A side effect
    such as `jax.debug.print` happens once in the forward pass and, as under `jax.checkpoint`, again
    when the backward pass recomputes the layer.

    **Arguments:**

    - `fn`: the layer. An Equinox module (or another callable pytree) stays one: its weights are
      still found by `jax.grad`, `optax` and friends. Any other callable becomes a function.
    - `policy`: what is kept for the backward pass: a name such as `"full"` (only the layer's inputs)
      or `"minimal"`, a [`remat_scan.Policy`][], or any callable that `jax.checkpoint` takes.
      `"none"` leaves `jax.checkpoint` out.
    - `isolation`: `"loop"` (a loop that runs once, as first done for Gemma-4 in maxtext#4847),
      `"barrier"` (`jax.lax.optimization_barrier` over inputs and cotangents), `"both"`, or `"none"`
      (plain `jax.checkpoint`).

    **Returns:**

    A callable with the name, docstring, signature and results of `fn`.

    **Raises:** `ValueError` for an unknown policy or isolation, and `TypeError` if `fn` is not
    callable, or is a class, a generator function or a coroutine function.
    """
    resolved = resolve(policy)
    check_isolation(isolation)
    return _decorate("checkpointed_layer", fn, resolved, isolation)


@overload
def isolated_scan(fn: Callable[P, R], /, *, isolation: Isolation = "loop") -> Callable[P, R]: ...
@overload
def isolated_scan(
    fn: None = None, /, *, isolation: Isolation = "loop"
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def isolated_scan(
    fn: Callable[..., Any] | None = None, /, *, isolation: Isolation = "loop"
) -> Callable[..., Any]:
    """The boundary of [`remat_scan.checkpointed_layer`][] alone, for a layer that is checkpointed
    already.

    ```python
    step = isolated_scan(jax.checkpoint(layer, policy=my_policy))
    ```

    The checkpoint belongs *inside*. A loop around a layer without a checkpoint keeps all of the
    layer's intermediates and costs more memory than no loop at all; a checkpoint around the loop
    costs more than the loop around the checkpoint.

    **Arguments:**

    - `fn`: as for [`remat_scan.checkpointed_layer`][].
    - `isolation`: `"loop"`, `"barrier"`, `"both"` or `"none"`.

    **Returns:**

    A callable with the name, docstring, signature and results of `fn`.

    **Raises:** `ValueError` for an unknown isolation, and `TypeError` if `fn` is not callable.
    """
    check_isolation(isolation)
    return _decorate("isolated_scan", fn, resolve("none"), isolation)


def _decorate(decorator: str, fn: Any, policy: Policy, isolation: str) -> Any:
    if fn is None:
        return ft.partial(_decorate, decorator, policy=policy, isolation=isolation)
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(_decorate(decorator, fn.__func__, policy, isolation))
    if not callable(fn):
        raise TypeError(
            f"{decorator} wraps a callable, got {fn!r}. Options are keywords: "
            f"@{decorator}(isolation={isolation!r})."
        )
    if inspect.isclass(fn):
        raise TypeError(
            f"{decorator} wraps a layer, got the class {fn.__qualname__}: wrap an instance, or "
            "decorate the class's __call__."
        )
    call = fn if inspect.isroutine(fn) or isinstance(fn, ft.partial) else type(fn).__call__
    if (
        inspect.isgeneratorfunction(call)
        or inspect.iscoroutinefunction(call)
        or inspect.isasyncgenfunction(call)
    ):
        raise TypeError(
            f"{decorator} wraps a function that returns its results, got the generator or "
            f"coroutine function {fn!r}, whose body runs after the call has returned."
        )
    if not jax.tree_util.all_leaves([fn]):
        return eqx.module_update_wrapper(_WrappedModule(fn, policy, isolation))

    @ft.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _run(fn, policy, isolation, args, kwargs)

    return wrapped


class _WrappedModule(eqx.Module):
    """A callable pytree behind the boundary: still a pytree with the same arrays."""

    _fn: Callable[..., Any]
    _policy: Policy = eqx.field(static=True)
    _isolation: str = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self._fn, self._policy, self._isolation, args, kwargs)


def _run(
    fn: Callable[..., Any],
    policy: Policy,
    isolation: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    program = trace(fn, args, kwargs)
    key = (id(program.jaxpr), policy, isolation)
    if program.built is not None and key in program.built:
        return program.unflatten(program.built[key](*program.operands))
    layer = program.evaluator()
    if policy.action(LAYER_INPUT) == "offload":
        layer = _tag_inputs(layer, program)
    if policy.offloads and isolation != "none":
        layer = offloading_layer(layer, program.num_weights, policy, isolation)
    else:
        if policy.checkpoint:
            # `prevent_cse` stays on also inside the loop: it costs nothing there, and if a compiler
            # drops the loop after all, the recomputation survives.
            layer = jax.checkpoint(layer, policy=policy.as_function())
        layer = isolate(layer, program.in_types, program.out_types, program.num_weights, isolation)
    # Under `jit` the layers of a stack that are alike share one jaxpr, so that differentiating and
    # lowering cost once, not per layer; XLA inlines the calls. It also names the layer in profiles.
    layer = jax.jit(_named(layer, program.name))
    if program.built is not None:
        program.built[key] = layer
    return program.unflatten(layer(*program.operands))


def _tag_inputs(fn: Flat, program: Program) -> Flat:
    """Names the arguments that an output continues, for policies that offload a layer's input."""
    inputs = set(streams(program.in_types, program.out_types, program.num_weights).values())

    def tagged(*operands: Any) -> Sequence[Any]:
        return fn(
            *(checkpoint_name(x, LAYER_INPUT) if i in inputs else x for i, x in enumerate(operands))
        )

    return tagged


def _named(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    def layer(*operands: Any) -> Any:
        return fn(*operands)

    layer.__name__ = layer.__qualname__ = name
    return layer
