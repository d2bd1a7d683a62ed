"""Running the layers of a stack: one by one, in segments, or as a scan over a period."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._isolation import Isolation, isolate
from ._layer import checkpointed_layer
from ._nested import Nested, nested_scan, size_of
from ._periods import Stacked, take, unstack_layers
from ._policies import Policy
from ._stack_layer import PerLayer, StackLayer, expand, read_before_written
from ._trace import is_array


def _apply(
    wrap: Callable[[Any], Any],
    layers: Sequence[StackLayer],
    x: Any,
    inputs: Sequence[tuple[Any, ...]],
    args: tuple[Any, ...],
    values: dict[str, Any],
    keys: Sequence[Any],
) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The loop in `run_stack`'s docstring. Returns `x`, what was written, what was collected."""
    written: dict[str, Any] = {}
    collected = []
    for layer, mine, key in zip(layers, inputs, keys, strict=True):
        named = {keyword: (values | written)[name] for keyword, name in layer.reads}
        if key is not None:
            named["key"] = key
        x, new, more = _sort_results(layer, wrap(layer.fn)(x, *mine, *args, **named))
        written |= new
        collected.append(more)
    return x, written, collected


def _sort_results(layer: StackLayer, results: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    names = layer.writes + layer.collects
    if not names:
        return results, {}, {}
    if not isinstance(results, tuple | list) or len(results) != 1 + len(names):
        got = f"{len(results)} results" if isinstance(results, tuple | list) else type(results)
        raise TypeError(
            f"Layer {layer.name!r} writes {layer.writes} and collects {layer.collects}, so it must "
            f"return (x, {', '.join(names)}), got {got}."
        )
    x, *more = results
    values = iter(more)
    written = {name: next(values) for name in layer.writes}
    return x, written, {name: next(values) for name in layer.collects}


class _Unit(NamedTuple):
    """Layers that are checkpointed and isolated as one, and what they are given."""

    layers: Any
    inputs: Any
    keys: Any
    policy: Policy
    isolation: Isolation
    # What waits in the backward pass: the weights of so many units later, or its own cotangents.
    hold: Any = None


def _run_units(
    segment: Callable[..., Any],
    tree: tuple[Any, ...],
    units: Sequence[_Unit],
    x: Any,
    args: tuple[Any, ...],
    values: dict[str, Any],
) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The units by their schedule; `segment` runs several layers as one."""
    written: dict[str, Any] = {}
    collected: list[dict[str, Any]] = []
    units, begin = list(units), 0
    for child in tree:
        end = begin + size_of(child)
        # Each layer adds to the cotangents of what all share; left alone, XLA keeps the terms of all
        # layers and adds them up at the end.
        shared = (x, args, values, written)
        if (hold := units[begin].hold) == "cotangents":
            shared, layers = _hold_cotangents((shared, units[begin].layers))
            units[begin] = units[begin]._replace(layers=layers)
        elif hold is not None:
            later = slice(begin + hold, begin + hold + 1)
            x, held = _hold((x, [u.layers for u in units[later]]))
            units[later] = [u._replace(layers=a) for u, a in zip(units[later], held, strict=True)]
            shared = (x, args, values, written)
        elif begin and units[begin].isolation != "none":
            shared = _hold_cotangents(shared)
        x, args, values, written = shared
        mine = units[begin:end]
        policy, isolation = mine[0].policy, mine[0].isolation
        if child != 1:
            policy = "full"
        wrap: Any = checkpointed_layer(policy=policy, isolation=isolation)
        reads = {
            name for u in mine for a in u.layers for layer in expand(a) for _, name in layer.reads
        }
        known = {name: v for name, v in (values | written).items() if name in reads}
        if child == 1 and len(mine[0].inputs) == 1:
            (unit,) = mine
            x, new, more = _apply(wrap, unit.layers, x, unit.inputs, args, known, unit.keys)
        else:
            x, new, more = wrap(segment)(child, mine, x, args, known)
        written |= new
        collected += more
        begin = end
    return x, written, collected


def segment_runner() -> Callable[..., Any]:
    """What runs a segment. Made for each call, because traces are kept as long as their function."""

    def segment(
        tree: Any, units: Sequence[_Unit], x: Any, args: tuple[Any, ...], values: dict[str, Any]
    ) -> Any:
        if tree != 1:
            return _run_units(segment, tree, units, x, args, values)
        (unit,) = units
        layers = unstack_layers(unit.layers)
        return _apply(lambda fn: fn, layers, x, unit.inputs, args, values, unit.keys)

    return segment


class Run(NamedTuple):
    """What all layers of one call have in common; indices count the layers of the whole stack."""

    args: tuple[Any, ...]
    per_layer: PerLayer
    key: Any
    policies: list[Any]
    isolations: list[Any]
    boundary: int
    overlap: int
    schedule: Nested
    segment: Callable[..., Any]

    def unrolled(
        self, layers: Sequence[StackLayer], start: int, x: Any, values: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
        inputs = [self.per_layer[start + j] for j in range(len(layers))]
        units = self._units(layers, start, start, inputs)
        tree = self.schedule.tree(len(units))
        x, written, collected = _run_units(self.segment, tree, units, x, self.args, values)
        return x, values | written, list(enumerate(collected, start))

    def period(
        self, stacked: Stacked, start: int, x: Any, values: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
        length, at_once = len(stacked.period), self.at_once(stacked, start)
        steps, size = stacked.repeats // at_once, at_once * length
        arrays, static = eqx.partition(stacked.period, is_array)
        if at_once > 1:
            shape = (steps, at_once)
            arrays = jax.tree.map(lambda a: jnp.reshape(a, (*shape, *a.shape[1:])), arrays)
        x_arrays, x_static = eqx.partition(x, is_array)
        written_names = {name for layer in stacked.period for name in layer.writes}
        read_first = read_before_written(stacked.period) & written_names
        old = {name: values[name] for name in written_names if name in values}
        old_arrays, old_static = eqx.partition(old, is_array)
        static_results: Any = None

        def body(carry: Any, xs: Any) -> Any:
            nonlocal static_results
            x_arrays, carried = carry
            arrays, rows, step = xs
            period = eqx.combine(arrays, static)
            layers = [Stacked(period, at_once)] if at_once > 1 else period
            inputs = [() if rows is None else (rows[j],) for j in range(size)]
            known = {name: eqx.combine(carried[name], old_static[name]) for name in read_first}
            units = self._units(layers, start, start + size * step, inputs, in_scan=True)
            x = eqx.combine(x_arrays, x_static)
            flat = (1,) * len(units)
            results = _run_units(self.segment, flat, units, x, self.args, values | known)
            (*carry, collected), static_results = eqx.partition(results, is_array)
            return tuple(carry), collected

        xs = (arrays, self.per_layer.rows(start, steps, size), jnp.arange(steps))
        (new_x, new), _ = jax.eval_shape(
            lambda carry, xs: body(carry, take(xs, 0)), (x_arrays, old_arrays), xs
        )
        span = _span(start, length)
        before, after = (x_arrays, x_static), (new_x, static_results[0])
        if not _same_types(before, after):
            raise TypeError(
                f"Layers {span} repeat, so x must leave them as it came, but it came as "
                f"{_show(before)} and left as {_show(after)}. Change its type outside the Stacked, or "
                "leave these layers unstacked."
            )
        initial = {}
        for name in new:
            after = (new[name], static_results[1][name])
            if name in old and _same_types((old_arrays[name], old_static[name]), after):
                initial[name] = old_arrays[name]
            elif name not in read_first:
                initial[name] = jax.tree.map(_placeholder, new[name])
            else:
                before = (old_arrays[name], old_static[name])
                raise TypeError(
                    f"Layers {span} repeat and read {name!r} from the repetition before, so they must "
                    f"write it as it was at first, but it was {_show(before)} and became "
                    f"{_show(after)}. Leave these layers unstacked."
                )
        each = 1 if at_once > 1 else -(-length // self.boundary)
        results = nested_scan(body, (x_arrays, initial), xs, steps, self.schedule.levels or 1, each)
        (x_arrays, new), collected = results
        x, written, collected = eqx.combine((x_arrays, new, collected), static_results)
        found = [
            (start + size * r + j, take(more, r))
            for r in range(steps)
            for j, more in enumerate(collected)
        ]
        return x, values | written, found

    def _units(
        self,
        layers: Sequence[Any],
        start: int,
        first: Any,
        inputs: Sequence[tuple[Any, ...]],
        in_scan: bool = False,
    ) -> list["_Unit"]:
        """Layers, each `boundary` of them as one. `first` is `start`, or traced in a period.

        A `Stacked` in their place is the whole of one boundary: cut inside it, so that the scan keeps
        the stacked weights for the backward pass and not its pieces beside them.
        """
        units = []
        for begin in range(0, len(inputs), self.boundary):
            policy, isolation = self.policies[start + begin], self.isolations[start + begin]
            hold = None
            if in_scan and len(inputs) <= self.boundary:
                isolation = "none"  # the iteration is the loop
            elif in_scan and (isolation == "barrier" or policy.offloads):
                # XLA compiles no loop or `custom_vjp` whose host residuals a scan then stacks.
                isolation, hold = "none", "cotangents"
            mine = inputs[begin : begin + self.boundary]
            keys = [
                None if self.key is None else jax.random.fold_in(self.key, first + begin + j)
                for j in range(len(mine))
            ]
            part = layers[begin : begin + self.boundary]
            units.append(_Unit(part, mine, keys, policy, isolation, hold))
        if self.overlap:
            units = [u._replace(isolation="none", hold=self.overlap) for u in units]
        return units

    def at_once(self, stacked: Stacked, start: int) -> int:
        """How many repetitions one iteration of the scan runs."""
        length = len(stacked.period)
        if self.boundary <= length:
            return 1
        if self.boundary % length or stacked.repeats % (self.boundary // length):
            span = _span(start, length * stacked.repeats)
            raise ValueError(
                f"boundary={self.boundary} cuts layers {span}, {stacked.repeats} repetitions of a "
                f"period of {length}, unevenly; it must divide the period or be such a multiple of it "
                "that the repetitions are a multiple of that."
            )
        return self.boundary // length


def _hold(tree: Any) -> Any:
    """One barrier over all arrays. In the backward pass it is one over their cotangents, so what made
    `x` waits for the weight gradients of the layers that come later with the held weights."""
    arrays, static = eqx.partition(tree, is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    types = [jax.typeof(leaf) for leaf in leaves]
    held = isolate(lambda *operands: operands, types, types, 0, "barrier")(*leaves)
    return eqx.combine(jax.tree.unflatten(treedef, list(held)), static)


def _hold_cotangents(tree: Any) -> Any:
    """A barrier in the backward pass alone. One in the forward pass too would give the scan new
    arrays to keep: a copy of all of its weights."""
    floats, rest = eqx.partition(tree, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(floats)

    def tie(primals: Any, tangents: Any) -> Any:
        # What is not differentiated stays so: its cotangents would be computed for nothing.
        moving = [i for i, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
        held = list(tangents[0])
        tied = jax.lax.optimization_barrier([held[i] for i in moving])
        for i, t in zip(moving, tied, strict=True):
            if jax.typeof(t) == jax.typeof(held[i]):  # jax 0.10 makes all vary over the mesh
                held[i] = t
        return primals[0], held

    same = jax.custom_jvp(lambda leaves: leaves)
    same.defjvp(tie, symbolic_zeros=True)
    return eqx.combine(jax.tree.unflatten(treedef, same(leaves)), rest)


def _same_types(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    """Whether two trees, each parted into arrays and the rest, are the same but for the numbers."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return False
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(
        (a.shape, a.dtype) == (b.shape, b.dtype) if hasattr(a, "dtype") else a == b
        for a, b in pairs
    )


def _show(parts: tuple[Any, Any]) -> str:
    return eqx.tree_pformat(eqx.combine(*parts), width=200, struct_as_array=True)


def _placeholder(aval: Any) -> Any:
    """A value that is never read, of the type that the first repetition will write."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, aval)
        impl = jax.random.key_impl(jax.random.key(0))
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impl)
    return jnp.zeros(aval.shape, aval.dtype)


def _span(start: int, size: int) -> str:
    return f"{start}-{start + size - 1}"


# -- Reading what was given ------------------------------------------------------------------------
