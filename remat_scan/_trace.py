"""A call of any layer as a flat program: arrays in, arrays out, everything else static.

This is where "arrays are traced, everything else is static" is decided, and where a layer is
traced: once per function, static values and array types, however often it is called or wrapped.
"""

import contextlib
import functools as ft
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.ref
import numpy as np


class Program(NamedTuple):
    """One traced call.

    The operands are the arrays that the layer closes over, then the arrays inside the callable
    itself (a module's weights), then those among the call's arguments.
    """

    name: str
    jaxpr: Any  # jax.extend.core.Jaxpr; its constvars stand for the closed-over arrays
    operands: list[Any]
    num_weights: int  # the operands before the call's arguments
    unflatten: Callable[[Sequence[Any]], Any]
    built: dict[Hashable, Any] | None  # what was made of this program before; `None`: don't keep it

    @property
    def in_types(self) -> list[Any]:
        return [v.aval for v in (*self.jaxpr.constvars, *self.jaxpr.invars)]

    @property
    def out_types(self) -> list[Any]:
        return [v.aval for v in self.jaxpr.outvars]

    def evaluator(self) -> Callable[..., list[Any]]:
        """The layer as a function of the operands."""
        jaxpr, num_consts = self.jaxpr, len(self.jaxpr.constvars)

        def evaluate(*operands: Any) -> list[Any]:
            return jax.core.eval_jaxpr(jaxpr, operands[:num_consts], *operands[num_consts:])

        return evaluate


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: JAX arrays, mutable ones too, typed PRNG keys, NumPy arrays and
    NumPy scalars of numbers."""
    if isinstance(leaf, jax.Array | jax.ref.Ref):
        return True
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm"


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Traces `fn(*args, **kwargs)`, or finds the trace of an earlier call with the same types.

    An exception inside the layer is the user's and arrives unchanged.
    """
    callee = as_pytree(fn)
    num_callee = len(jax.tree.leaves(callee))
    # As pairs, because a dictionary's order would not survive.
    leaves, treedef = jax.tree.flatten((callee, args, tuple(kwargs.items())))
    is_dynamic = tuple(map(is_array, leaves))
    arrays = [leaf for leaf, dynamic in zip(leaves, is_dynamic, strict=True) if dynamic]
    name = name_of(fn)
    flat = _flat_layer(name, leaves, treedef, is_dynamic)
    closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    out_leaves, out_treedef = jax.tree.flatten(out, is_leaf=_is_static_output)

    def unflatten(outputs: Sequence[Any]) -> Any:
        arrays = iter(outputs)
        return jax.tree.unflatten(
            out_treedef, [x.value if _is_static_output(x) else next(arrays) for x in out_leaves]
        )

    consts = list(closed.consts)
    # A closed-over tracer belongs to one outer trace: nothing built on it may outlive that.
    lasting = not any(isinstance(c, jax.core.Tracer) for c in consts)
    return Program(
        name,
        closed.jaxpr,
        consts + arrays,
        len(consts) + sum(is_dynamic[:num_callee]),
        unflatten,
        flat.built if lasting else None,
    )


# -- The callable --------------------------------------------------------------------------------


def _call_partial(
    fn: Callable[..., Any], partial_kwargs: Sequence[Any], /, *args: Any, **kwargs: Any
) -> Any:
    return fn(*args, **{**dict(partial_kwargs), **kwargs})


def as_pytree(fn: Any) -> Any:
    """The callable with the arrays inside it visible: bound methods and partials are opened."""
    if isinstance(fn, types.MethodType):
        return jax.tree_util.Partial(fn.__func__, fn.__self__)
    if type(fn) is ft.partial:
        keywords = tuple(fn.keywords.items())
        return jax.tree_util.Partial(_call_partial, as_pytree(fn.func), keywords, *fn.args)
    return fn


def name_of(fn: Callable[..., Any]) -> str:
    """The name of the function, or of the class of the callable, inside partials of any kind."""
    while isinstance(fn, ft.partial):
        fn = fn.args[0] if fn.func is _call_partial else fn.func
    return getattr(fn, "__name__", type(fn).__name__)


# -- Static values -------------------------------------------------------------------------------


class _StaticOutput:
    """A result that is no array, on its way through a pytree of arrays."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_static(_StaticOutput)


def _is_static_output(x: Any) -> bool:
    return isinstance(x, _StaticOutput)


class _StaticInput:
    """A static leaf in a cache key: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        shown = repr(value) if isinstance(value, float | complex) else ""
        self._key = (type(value), shown, value)
        self._hash = hash(self._key)  # TypeError for unhashable values: such calls are not cached

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StaticInput) and (
            self.value is other.value or self._key == other._key
        )


# -- Tracing once --------------------------------------------------------------------------------


class _FlatLayer:
    """A layer as a function of its arrays alone. JAX caches its traces by the identity of this."""

    def __init__(
        self, name: str, leaves: list[Any], treedef: Any, is_dynamic: tuple[bool, ...], weak: bool
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._treedef = treedef
        self._is_dynamic = is_dynamic
        self._static = [None if d else x for x, d in zip(leaves, is_dynamic, strict=True)]
        self._anchor = None
        if weak:
            self._anchor, self._static[0] = weakref.ref(leaves[0]), None
        self.built: dict[Hashable, Any] = {}

    def __call__(self, *arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [
            next(rest) if d else x for x, d in zip(self._static, self._is_dynamic, strict=True)
        ]
        if self._anchor is not None:
            leaves[0] = self._anchor()
        callee, args, kwargs = jax.tree.unflatten(self._treedef, leaves)
        out = callee(*args, **dict(kwargs))
        return jax.tree.map(lambda x: x if is_array(x) else _StaticOutput(x), out)


_MAX_KEPT = 256  # flat layers kept per function


class _Kept:
    """The flat layers of one function, for as long as what it closes over stays the same."""

    def __init__(self) -> None:
        self.captured: list[Any] | None = None
        self.layers: OrderedDict[Hashable, _FlatLayer] = OrderedDict()


# Keyed by the identity of a function, which is not kept alive; the key 0 is for callables that are
# pytrees, of which only the static parts are kept.
_FLAT_LAYERS: dict[int, _Kept] = {0: _Kept()}


def _flat_layer(
    name: str, leaves: list[Any], treedef: Any, is_dynamic: tuple[bool, ...]
) -> _FlatLayer:
    first = leaves[0] if leaves and not is_dynamic[0] else None
    weak = first is not None and type(first).__weakrefoffset__ != 0
    anchor = id(first) if weak else 0
    try:
        static = tuple(
            _StaticInput(x)
            for x, dynamic in zip(leaves[weak:], is_dynamic[weak:], strict=True)
            if not dynamic
        )
        key = (treedef, is_dynamic, static)
        hash(key)
    except TypeError:
        return _FlatLayer(name, leaves, treedef, is_dynamic, weak=False)
    if anchor not in _FLAT_LAYERS:
        _FLAT_LAYERS[anchor] = _Kept()
        weakref.finalize(first, _FLAT_LAYERS.pop, anchor, None)
    kept = _FLAT_LAYERS[anchor]
    if weak and kept.captured != (captured := _captured(first)):
        kept.captured, kept.layers = captured, OrderedDict()
    layers = kept.layers
    if (flat := layers.get(key)) is None:
        layers[key] = flat = _FlatLayer(name, leaves, treedef, is_dynamic, weak)
        while len(layers) > _MAX_KEPT:
            layers.popitem(last=False)
    return flat


# -- What a function closes over -----------------------------------------------------------------


class _CapturedArray:
    """An array that a function closes over, compared by identity and not kept alive."""

    def __init__(self, array: Any) -> None:
        self._array = weakref.ref(array)

    def __eq__(self, other: object) -> bool:
        mine = self._array()
        return mine is not None and isinstance(other, _CapturedArray) and mine is other._array()


def _captured(fn: Any) -> list[Any]:
    """Arrays in the closure of a function, or among the attributes of an object.

    A cached trace holds the values of these. A loop that rebinds them, such as

    ```python
    @checkpointed_layer
    def layer(x):
        return x @ w

    for w in weights:
        x = layer(x)
    ```

    or a method of an object whose attributes were set anew, would silently get the first ones
    again. Any other state (numbers, globals, attributes of attributes) is read when a layer is
    traced, as under `jax.jit`.
    """
    found, seen, functions = [], set(), [fn]
    while functions:
        fn = functions.pop()
        seen.add(id(fn))
        for leaf in _leaves(_state(fn)):
            if isinstance(leaf, types.FunctionType):
                functions += [leaf] if id(leaf) not in seen else []
            elif is_array(leaf) and type(leaf).__weakrefoffset__ != 0:
                found.append(_CapturedArray(leaf))
    return found


def _state(fn: Any) -> list[Any]:
    if not isinstance(fn, types.FunctionType):
        return list(getattr(fn, "__dict__", {}).values())
    contents = []
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            contents.append(cell.cell_contents)
    return contents


def _leaves(values: list[Any]) -> Iterator[Any]:
    for value in values:
        with contextlib.suppress(TypeError, ValueError):  # for example a dictionary of unlike keys
            yield from jax.tree.leaves(value)
