"""`StackLayer`: what a layer of a stack reads and writes, what it is given, which patterns mean it."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from ._periods import Stacked, kinds_of, stack_trees, take
from ._trace import as_pytree, is_array, name_of


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
        self.name = name_of(fn) if name is None else name
        results = self.writes + self.collects
        if len(set(results)) < len(results):
            raise ValueError(f"StackLayer {self.name!r}: a name is there twice in {results}.")


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def as_layers(item: Any) -> Any:
    """Every layer as a `StackLayer`, inside a `Stacked` too."""
    if isinstance(item, Stacked):
        return Stacked([as_layers(layer) for layer in item.period], item.repeats)
    return item if isinstance(item, StackLayer) else StackLayer(item)


def expand(item: Any) -> Sequence[StackLayer]:
    return item.period * item.repeats if isinstance(item, Stacked) else (item,)


def read_before_written(period: Sequence[StackLayer]) -> set[str]:
    read: set[str] = set()
    written: set[str] = set()
    for layer in period:
        read |= {name for _, name in layer.reads} - written
        written |= set(layer.writes)
    return read


def check_order(layers: Sequence[StackLayer], given: Mapping[str, Any]) -> None:
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


# -- For each layer ---------------------------------------------------------------------------------


def for_each(what: str, given: Any, layers: Sequence[StackLayer]) -> list[Any]:
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


class PerLayer:
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
