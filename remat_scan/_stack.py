"""`run_stack`: a list of unlike layers, with values that cross them, as one call."""

import difflib
import fnmatch
import functools as ft
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ._isolation import check_isolation, isolate
from ._layer import checkpointed_layer
from ._periods import Stacked, as_pytree, kinds_of, stack_trees, take, unstack_layers
from ._policies import resolve
from ._trace import _name, is_array

T = TypeVar("T")


class StackLayer(eqx.Module):
    """A layer of a stack that reads or writes named values, or has a name of its own.

    ```python
    StackLayer(block, reads={"shared": "kv"})       # x = block(x, shared=values["kv"])
    StackLayer(block, writes="kv")                  # x, values["kv"] = block(x)
    StackLayer(block, writes="kv", collects="aux")  # x, values["kv"], aux = block(x)
    ```

    **Arguments:**

    - `fn`: the layer.
    - `reads`: the values that it is given, as a mapping from its keyword to the value's name, or just
      the names, where the keywords are the same.
    - `writes`: the names of values that it returns after `x`, in this order, for the layers after it.
      A later layer that writes the same name takes its place.
    - `collects`: the names of values that it returns after those, for the caller: losses, statistics.
    - `name`: what patterns in `policy` and `isolation` match; the name of the function or class
      otherwise. It says which kind of layer this is: layers with different names are not alike, and so
      never in one period.

    **Raises:** `ValueError` if a name is given twice.
    """

    fn: Callable[..., Any]
    reads: tuple[tuple[str, str], ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    collects: tuple[str, ...] = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        reads: Mapping[str, str] | Iterable[str] = (),
        writes: Iterable[str] = (),
        collects: Iterable[str] = (),
        name: str | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"A layer of a stack is a callable, got {fn!r}.")
        self.fn = as_pytree(fn)  # arrays inside a partial or a method are parameters too
        if isinstance(reads, Mapping):
            self.reads = tuple(reads.items())
        else:
            self.reads = tuple((name, name) for name in _names(reads))
        self.writes, self.collects = _names(writes), _names(collects)
        self.name = _name(fn) if name is None else name
        results = self.writes + self.collects
        if len(set(results)) < len(results):
            raise ValueError(f"StackLayer {self.name!r}: a name is there twice in {results}.")


class StackResult(NamedTuple):
    """What [`remat_scan.run_stack`][] returns.

    - `x`: the stream after the last layer.
    - `values`: by name, the last of each value that a layer wrote, and those that were given.
    - `collected`: by name, what layers collected, by the layer's index.
    """

    x: Any
    values: dict[str, Any]
    collected: dict[str, dict[int, Any]]


def run_stack(
    layers: Sequence[Any],
    x: Any,
    *args: Any,
    per_layer: Any = None,
    values: Mapping[str, Any] | None = None,
    key: PRNGKeyArray | None = None,
    policy: Any = "full",
    isolation: Any = "loop",
    boundary: int = 1,
    overlap: int = 0,
) -> StackResult:
    """Runs a list of layers, alike or not, each behind [`remat_scan.checkpointed_layer`][].

    ```python
    def run_stack(layers, x, *args, per_layer, values, key, policy, isolation):
        collected = {}
        for i, layer in enumerate(layers):
            inputs = (x,) if per_layer is None else (x, per_layer[i])
            named = {keyword: values[name] for keyword, name in layer.reads.items()}
            if key is not None:
                named["key"] = jax.random.fold_in(key, i)
            run = checkpointed_layer(layer.fn, policy=policy[i], isolation=isolation[i])
            result = run(*inputs, *args, **named)
            x, *more = result if layer.writes or layer.collects else (result,)
            for name in layer.writes:
                values[name] = more.pop(0)
            for name in layer.collects:
                collected.setdefault(name, {})[i] = more.pop(0)
        return x, values, collected
    ```

    A layer that writes and collects nothing returns `x` alone. Every layer keeps its own parameters,
    their tree and their shardings:

    ```python
    y = run_stack(blocks, x, mask, per_layer=embeddings).x

    stack = [StackLayer(b, collects="loss") if b.is_moe else b for b in blocks]
    y, _, collected = run_stack(stack, x, policy={"MoE": "full", "Dense": "save_qkv_proj"})
    loss = sum(collected["loss"].values())
    ```

    A [`remat_scan.Stacked`][] among the layers stands for all of its repetitions, and runs as one
    `jax.lax.scan` with each layer isolated inside: tracing and compiling no longer grow with depth.
    What is written in one repetition is there in the next, and the last is left after the run. A list
    is made into such a stack by [`remat_scan.stack_layers`][], which says what that costs.

    What a period costs in memory: the gradients of all its repetitions lie in one array from the
    start of the backward pass, where an unrolled stack's come one after another. A period that is one
    boundary needs no isolation inside, since the iteration is the loop. In longer ones `"barrier"`
    acts in the backward pass alone, and keeps nothing more; `"loop"` and `"both"` keep a second copy
    of the run's weights (each device its shard) for the backward pass.

    **Arguments:**

    - `layers`: callables, [`remat_scan.StackLayer`][]s and [`remat_scan.Stacked`][]s.
    - `x`: the stream, any pytree; layers may change its type, but not within a `Stacked`.
    - `args`: given to every layer after `x` (and after its slice of `per_layer`).
    - `per_layer`: a `list` with an entry for each layer, or another pytree of arrays with a leading
      axis of that length. A list's entries may be unlike, but for the layers at the same place of a
      period, whose entries are stacked (copied).
    - `values`: named values that exist before the first layer.
    - `key`: layers get the keyword `key=`, this key with the layer's index folded in. Periods and
      boundaries change no key.
    - `policy`, `isolation`: as for [`remat_scan.checkpointed_layer`][]: one for all layers, a list with
      one for each, or a mapping from patterns to them. A pattern is a layer's index or a range
      (`3`, `"0-14"`, both ends included), or a name with wildcards as in `fnmatch`. The first pattern
      that matches a layer counts.
    - `boundary`: how many consecutive layers are checkpointed and isolated as one. Only what crosses
      the boundary is kept, and the working set is that of so many layers. They are counted anew from
      the start of each `Stacked`.
    - `overlap`: for `isolation="barrier"`, how many layers (or boundaries) a weight gradient may come
      late, so that its reduction over devices runs beside the backward pass of the layers before. Layer
      `i - 1` then waits for the weight gradients of layer `i + overlap`, and up to so many working sets
      more are alive. Iterations of a `Stacked` never overlap, the layers inside one do.

    **Returns:**

    A [`remat_scan.StackResult`][].

    **Raises:** `ValueError` before anything is traced, if a layer reads a value that no layer before it
    has written, a pattern matches no layer, a layer is matched by no pattern, lengths differ, or
    layers in one boundary or at the same place of a period have different policies or isolations.
    `TypeError` if a layer does not return what it declares, or a period changes the type of `x`.
    """
    stack = [_as_layers(item) for item in layers]
    every = [layer for item in stack for layer in _expand(item)]
    given = dict(values or {})
    _check_order(every, given)
    if not isinstance(boundary, int) or boundary < 1:
        raise ValueError(f"boundary={boundary!r}: a number of layers, at least 1, is needed.")
    if not isinstance(overlap, int) or overlap < 0:
        raise ValueError(f"overlap={overlap!r}: a number of layers, at least 0, is needed.")

    def segment(layers: Sequence[Any], *rest: Any) -> Any:
        # Made for this call, because traces are kept as long as the function they are of.
        return _apply(lambda fn: fn, unstack_layers(layers), *rest)

    run = _Run(
        args,
        _PerLayer(per_layer, len(every)),
        key,
        [resolve(p) for p in _for_each("policy", policy, every)],
        _for_each("isolation", isolation, every),
        boundary,
        overlap,
        segment,
    )
    for i, kind in enumerate(run.isolations):
        check_isolation(kind)
        if overlap and (kind != "barrier" or run.policies[i].offloads):
            raise ValueError(
                f"overlap={overlap} needs isolation='barrier' and a policy that offloads nothing, but "
                f"layer {i} has isolation={kind!r} and policy={str(run.policies[i])!r}."
            )
    todo = list(_group(stack, run))
    collected: dict[str, dict[int, Any]] = {}
    for start, item in todo:
        if isinstance(item, Stacked):
            x, given, found = run.period(item, start, x, given)
        else:
            x, given, found = run.unrolled(item, start, x, given)
        for i, more in found:
            for name, value in more.items():
                collected.setdefault(name, {})[i] = value
    return StackResult(x, given, collected)


# -- Running ---------------------------------------------------------------------------------------


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


class _Run(NamedTuple):
    """What all layers of one call have in common; indices count the layers of the whole stack."""

    args: tuple[Any, ...]
    per_layer: "_PerLayer"
    key: Any
    policies: list[Any]
    isolations: list[Any]
    boundary: int
    overlap: int
    segment: Callable[..., Any]

    def unrolled(
        self, layers: Sequence[StackLayer], start: int, x: Any, values: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
        inputs = [self.per_layer[start + j] for j in range(len(layers))]
        x, written, collected = self._segments(layers, start, start, inputs, x, values)
        return x, values | written, list(enumerate(collected, start))

    def period(
        self, stacked: Stacked, start: int, x: Any, values: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], list[tuple[int, dict[str, Any]]]]:
        length, at_once = len(stacked.period), self._at_once(stacked, start)
        steps, size = stacked.repeats // at_once, at_once * length
        arrays, static = eqx.partition(stacked.period, is_array)
        if at_once > 1:
            shape = (steps, at_once)
            arrays = jax.tree.map(lambda a: jnp.reshape(a, (*shape, *a.shape[1:])), arrays)
        x_arrays, x_static = eqx.partition(x, is_array)
        written_names = {name for layer in stacked.period for name in layer.writes}
        read_first = _read_before_written(stacked.period) & written_names
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
            results = self._segments(
                layers,
                start,
                start + size * step,
                inputs,
                eqx.combine(x_arrays, x_static),
                values | known,
                in_scan=True,
            )
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
        results = jax.lax.scan(body, (x_arrays, initial), xs)
        (x_arrays, new), collected = results
        x, written, collected = eqx.combine((x_arrays, new, collected), static_results)
        found = [
            (start + size * r + j, take(more, r))
            for r in range(steps)
            for j, more in enumerate(collected)
        ]
        return x, values | written, found

    def _segments(
        self,
        layers: Sequence[Any],
        start: int,
        first: Any,
        inputs: Sequence[tuple[Any, ...]],
        x: Any,
        values: dict[str, Any],
        in_scan: bool = False,
    ) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        """Layers, each `boundary` of them as one. `first` is `start`, or traced in a period.

        A `Stacked` in their place is the whole of one boundary: cut inside it, so that the scan keeps
        the stacked weights for the backward pass and not its pieces beside them.
        """
        written: dict[str, Any] = {}
        collected: list[dict[str, Any]] = []
        layers = list(layers)
        for begin in range(0, len(inputs), self.boundary):
            policy, isolation = self.policies[start + begin], self.isolations[start + begin]
            if self.overlap:
                isolation = "none"
                later = begin + self.overlap * self.boundary
                ahead = slice(later, later + self.boundary)
                x, layers[ahead] = _hold((x, layers[ahead]))
            elif in_scan and not self.policies[start + begin].offloads:
                if len(inputs) <= self.boundary:
                    isolation = "none"  # the iteration is the loop
                elif isolation == "barrier":
                    isolation = "none"
                    now = slice(begin, begin + self.boundary)
                    x, layers[now] = _hold_cotangents((x, layers[now]))
            part = layers[begin : begin + self.boundary]
            wrap = ft.partial(checkpointed_layer, policy=policy, isolation=isolation)
            mine = inputs[begin : begin + self.boundary]
            keys = [
                None if self.key is None else jax.random.fold_in(self.key, first + begin + j)
                for j in range(len(mine))
            ]
            reads = {name for item in part for layer in _expand(item) for _, name in layer.reads}
            known = {name: v for name, v in (values | written).items() if name in reads}
            if len(mine) == 1:
                x, new, more = _apply(wrap, part, x, mine, self.args, known, keys)
            else:
                x, new, more = wrap(self.segment)(part, x, mine, self.args, known, keys)
            written |= new
            collected += more
        return x, written, collected

    def _at_once(self, stacked: Stacked, start: int) -> int:
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
        return primals[0], jax.lax.optimization_barrier(tangents[0])

    same = jax.custom_jvp(lambda leaves: leaves)
    same.defjvp(tie)
    return eqx.combine(jax.tree.unflatten(treedef, same(leaves)), rest)


class _PerLayer:
    """Each layer's own input: one entry of a list, or one row of a pytree of arrays."""

    def __init__(self, tree: Any, count: int) -> None:
        self._tree = tree
        self._list = isinstance(tree, list)
        if self._list and len(tree) != count:
            raise ValueError(
                f"per_layer is a list of {len(tree)} entries, but there are {count} layers."
            )
        if tree is None or self._list:
            return
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not is_array(leaf) or leaf.shape[:1] != (count,):
                got = f"the shape {leaf.shape}" if is_array(leaf) else f"no array: {leaf!r}"
                raise ValueError(
                    f"per_layer{jax.tree_util.keystr(path)} needs a leading axis for the {count} "
                    f"layers, but has {got}. For unlike entries give a list of {count}."
                )

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        if self._tree is None:
            return ()
        return (self._tree[i] if self._list else take(self._tree, i),)

    def rows(self, start: int, steps: int, size: int) -> Any:
        """The `xs` of a scan of so many steps over so many layers each."""
        if self._tree is None:
            return None
        # One tree for each place: the scan then keeps these for the backward pass, not pieces beside.
        places = [slice(start + j, start + steps * size, size) for j in range(size)]
        if not self._list:
            return [take(self._tree, place) for place in places]
        columns = [self._tree[place] for place in places]
        for j, column in enumerate(columns):
            kinds = kinds_of([jax.tree.map(_type_of, entry) for entry in column])
            if any(kinds):
                other = start + j + size * next(r for r, kind in enumerate(kinds) if kind)
                raise ValueError(
                    f"per_layer[{start + j}] and per_layer[{other}] are unlike, but the layers are "
                    "repetitions of one period."
                )
        return [stack_trees(column) for column in columns]


def _type_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if is_array(leaf) else leaf


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


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _as_layers(item: Any) -> Any:
    """Every layer as a `StackLayer`, inside a `Stacked` too."""
    if isinstance(item, Stacked):
        return Stacked([_as_layers(layer) for layer in item.period], item.repeats)
    return item if isinstance(item, StackLayer) else StackLayer(item)


def _expand(item: Any) -> Sequence[StackLayer]:
    return item.period * item.repeats if isinstance(item, Stacked) else (item,)


def _group(stack: Sequence[Any], run: _Run) -> Iterable[tuple[int, Any]]:
    """Where each run begins, and the run: a `Stacked`, or a list of layers that are unrolled."""
    runs: list[tuple[int, Any]] = []
    index = 0
    for item in stack:
        if isinstance(item, Stacked):
            runs.append((index, item))
        elif runs and isinstance(runs[-1][1], list):
            runs[-1][1].append(item)
        else:
            runs.append((index, [item]))
        index += len(_expand(item))
    for start, item in runs:
        length = len(item.period) if isinstance(item, Stacked) else len(item)
        count = length * item.repeats if isinstance(item, Stacked) else length
        size = length * (run._at_once(item, start) if isinstance(item, Stacked) else 1)
        for i in range(start, start + count):
            place = (i - start) % size  # in one iteration of the scan
            head = start + place - place % run.boundary
            _check_equal(run, head, i, "in one boundary" if i < start + size else "in one period")
    return runs


def _check_equal(run: _Run, first: int, other: int, how: str) -> None:
    for what, all_of_them in (("policy", run.policies), ("isolation", run.isolations)):
        if all_of_them[first] != all_of_them[other]:
            raise ValueError(
                f"Layers {first} and {other} are {how}, but their {what} is "
                f"{str(all_of_them[first])!r} and {str(all_of_them[other])!r}. Give them the same, or "
                "part them: [*stack_layers(layers[:n]), *stack_layers(layers[n:])]."
            )


def _read_before_written(period: Sequence[StackLayer]) -> set[str]:
    read: set[str] = set()
    written: set[str] = set()
    for layer in period:
        read |= {name for _, name in layer.reads} - written
        written |= set(layer.writes)
    return read


def _check_order(layers: Sequence[StackLayer], given: Mapping[str, Any]) -> None:
    known = set(given)
    for i, layer in enumerate(layers):
        for _, name in layer.reads:
            if name in known:
                continue
            later = [j for j, other in enumerate(layers) if j >= i and name in other.writes]
            if later:
                hint = f"Layer {later[0]} produces it" + (
                    " itself." if later[0] == i else " later."
                )
            else:
                near = difflib.get_close_matches(
                    name, {n for a in layers for n in a.writes} | known
                )
                hint = "No layer writes it" + (f"; did you mean {near[0]!r}?" if near else ".")
            raise ValueError(
                f"Layer {i} ({layer.name}) reads {name!r} before any layer has produced it. {hint}"
            )
        known |= set(layer.writes)


def _for_each(what: str, given: Any, layers: Sequence[StackLayer]) -> list[Any]:
    """A policy or isolation for each layer."""
    count = len(layers)
    if isinstance(given, list | tuple):
        if len(given) != count:
            raise ValueError(f"{what}: {len(given)} given for {count} layers.")
        return list(given)
    if not isinstance(given, Mapping):
        return [given] * count
    matches = {
        pattern: [i for i, layer in enumerate(layers) if _matches(pattern, i, layer.name)]
        for pattern in given
    }
    names = ", ".join(dict.fromkeys(layer.name for layer in layers))
    for pattern, found in matches.items():
        if not found:
            hint = (
                " For words per tensor use Policy.custom(...)."
                if given[pattern] in ("remat", "device", "offload")
                else ""
            )
            raise ValueError(
                f"{what}: the pattern {pattern!r} matches no layer. There are {count}, from 0 to "
                f"{count - 1}, named {names}.{hint}"
            )
    chosen = []
    for i, layer in enumerate(layers):
        first = next((pattern for pattern, found in matches.items() if i in found), None)
        if first is None:
            raise ValueError(
                f"{what}: no pattern matches layer {i} ({layer.name}). Add {{'*': ...}} at the end "
                "for the rest."
            )
        chosen.append(given[first])
    return chosen


def _matches(pattern: Any, i: int, name: str) -> bool:
    if isinstance(pattern, int):
        return pattern == i
    if span := re.fullmatch(r"(\d+)(?:-(\d+))?", pattern):
        return int(span[1]) <= i <= int(span[2] or span[1])
    return fnmatch.fnmatchcase(name, pattern)
