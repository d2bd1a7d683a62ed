"""Layers that repeat: `Stacked`, and the way there and back from a list."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ._trace import _StaticInput, as_pytree, is_array


class Stacked(eqx.Module):
    """Repetitions of a period of layers, run by [`remat_scan.run_stack`][] as one `jax.lax.scan`.

    ```python
    for r in range(repeats):
        for layer in period:
            x = jax.tree.map(lambda array: array[r], layer)(x)
    ```

    Layers made by `equinox.filter_vmap` have this form already:

    ```python
    blocks = eqx.filter_vmap(Block)(jax.random.split(key, 32))
    x = run_stack([Stacked((blocks,), 32)], x).x
    ```

    It is a pytree whose arrays are the layers' own with a leading axis, so that it goes into a model,
    an optimiser and a checkpoint as any layer does.

    **Arguments:**

    - `period`: the layers that repeat, each a callable pytree or a [`remat_scan.StackLayer`][];
      every array in them has a leading axis of length `repeats`.
    - `repeats`: how often.

    **Raises:** `ValueError` for an empty period, `repeats` below 1, or an array without that axis.
    """

    period: tuple[Any, ...]
    repeats: int = eqx.field(static=True)

    def __init__(self, period: Sequence[Any], repeats: int) -> None:
        self.period = tuple(as_pytree(layer) for layer in period)
        self.repeats = repeats
        if not self.period or repeats < 1:
            raise ValueError(
                f"Stacked: a period of {len(self.period)} layers, {repeats} times; both need to be "
                "at least 1."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.period):
            if _has_shape(leaf) and leaf.shape[:1] != (repeats,):
                raise ValueError(
                    f"Stacked: repeats={repeats}, so every array needs a leading axis of {repeats}, "
                    f"but period{jax.tree_util.keystr(path)} has the shape {leaf.shape}."
                )


def stack_layers(layers: Sequence[Any], *, period: int | None = None) -> list[Any]:
    """Finds the periods in a list of layers and stacks their arrays.

    ```python
    stack_layers([a0, b0, a1, b1, c])  # == [Stacked((a0 + a1, b0 + b1), 2), c]
    ```

    in which `+` is `jnp.stack` of each array. Layers are alike, and so may be repetitions of one
    another, if they are the same tree with equal static values and arrays of the same shapes, dtypes
    and shardings: a layer with its own index in a static field has no like. Of all ways to cut the
    list, the one is taken that leaves the fewest layers to compile. Layers that repeat nothing stay as
    they are.

    Stacking copies: for a moment the weights are there twice. Called once, when a model is made or
    read, that is all it costs; the optimiser and the checkpoints then hold the stacked arrays. Called
    inside the training step it is paid in every step, and so are the gradients' way back: about the
    bytes of the repeated layers' weights and of their gradients, more at the peak.

    **Arguments:**

    - `layers`: callables and [`remat_scan.StackLayer`][]s. A `functools.partial` becomes a
      `jax.tree_util.Partial`, so that its arrays are seen.
    - `period`: how many layers repeat; found if it is not given.

    **Returns:**

    A list of layers and [`remat_scan.Stacked`][]s, for [`remat_scan.run_stack`][].

    **Raises:** `ValueError` if `period` is given and no neighbouring periods are alike, with the first
    difference.
    """
    layers = [as_pytree(layer) for layer in layers]
    if period is not None and not 1 <= period <= len(layers) // 2:
        raise ValueError(
            f"stack_layers: a period of {period} can't repeat in {len(layers)} layers; it is from 1 "
            f"to {len(layers) // 2}."
        )
    kind_of = kinds_of(layers)
    cuts = _cut(kind_of, period)
    if period is not None and all(repeats == 1 for _, repeats in cuts):
        differ = next(i for i in range(period) if kind_of[i] != kind_of[i + period])
        raise ValueError(
            f"stack_layers: period={period}, but no layers are alike at that distance. Layers "
            f"{differ} and {differ + period} differ: "
            f"{_difference(layers[differ], layers[differ + period])}."
        )
    stack, start = [], 0
    for length, repeats in cuts:
        run = layers[start : start + length * repeats]
        start += length * repeats
        if repeats == 1:
            stack += run
        else:
            stacked = [stack_trees(run[j::length]) for j in range(length)]
            stack.append(Stacked(stacked, repeats))
    return stack


def unstack_layers(stack: Sequence[Any]) -> list[Any]:
    """The layers one by one: what [`remat_scan.stack_layers`][] was given.

    **Arguments:**

    - `stack`: layers and [`remat_scan.Stacked`][]s.

    **Returns:**

    A list of layers without `Stacked`s.
    """
    layers: list[Any] = []
    for item in stack:
        if isinstance(item, Stacked):
            for r in range(item.repeats):
                layers += take(item.period, r)
        else:
            layers.append(item)
    return layers


def stack_trees(trees: Sequence[Any]) -> Any:
    """Like trees as one, each array with a leading axis more; static leaves are the first tree's."""
    flat = [jax.tree.flatten(tree) for tree in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(flat[0][1], [_stack(c) if is_array(c[0]) else c[0] for c in columns])


def take(tree: Any, *index: Any) -> Any:
    """The tree with each array indexed along its leading axes."""
    return jax.tree.map(lambda x: x[index] if is_array(x) else x, tree)


def kinds_of(trees: Sequence[Any]) -> list[int]:
    """A number per tree, the same for trees that are alike."""
    kinds: list[Any] = []
    return [_kind(tree, kinds) for tree in trees]


def _stack(arrays: Sequence[Any]) -> Any:
    sharding = _named_sharding(arrays[0])
    if sharding is None:
        return jnp.stack(arrays)
    mesh, spec = sharding.mesh, PartitionSpec(None, *sharding.spec)
    # jax 0.10 stacks nothing sharded in the host's memory: on the devices, and back.
    stack = jax.jit(jnp.stack, out_shardings=NamedSharding(mesh, spec))
    stacked = stack(jax.device_put(list(arrays), NamedSharding(mesh, sharding.spec)))
    return jax.device_put(stacked, NamedSharding(mesh, spec, memory_kind=sharding.memory_kind))


def _named_sharding(array: Any) -> NamedSharding | None:
    """Where a concrete array lies; a tracer's sharding is the compiler's affair."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    return array.sharding if isinstance(array.sharding, NamedSharding) else None


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


# -- Likeness --------------------------------------------------------------------------------------


def _signature(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(map(_leaf_signature, leaves))


def _leaf_signature(leaf: Any) -> Any:
    if not is_array(leaf):
        try:
            return _StaticInput(leaf)
        except TypeError:  # unhashable: like itself only
            return id(leaf)
    return np.shape(leaf), leaf.dtype, _named_sharding(leaf)


def _kind(tree: Any, kinds: list[Any]) -> int:
    signature = _signature(tree)
    if signature not in kinds:
        kinds.append(signature)
    return kinds.index(signature)


def _difference(a: Any, b: Any) -> str:
    (tree_a, leaves_a), (tree_b, leaves_b) = _signature(a), _signature(b)
    if tree_a != tree_b:
        return "their trees or static fields are unlike"
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(a)]
    values = zip(paths, leaves_a, leaves_b, jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    path, x, y = next((path, x, y) for path, mine, other, x, y in values if mine != other)
    where = jax.tree_util.keystr(path) or "the layer"
    return f"{where} is {_show(x)} in one and {_show(y)} in the other"


def _show(leaf: Any) -> str:
    if not is_array(leaf):
        return repr(leaf)
    sharding = _named_sharding(leaf)
    lies = f" of {sharding.spec} in {sharding.memory_kind}" if sharding is not None else ""
    return f"{leaf.dtype}{list(leaf.shape)}{lies}"


def _cut(kinds: Sequence[int], period: int | None) -> list[tuple[int, int]]:
    """`(length, repeats)` of consecutive runs, such that the fewest layers are left to compile."""
    N = len(kinds)
    best: list[tuple[tuple[int, int], list[tuple[int, int]]]] = [((0, 0), [])]
    for start in reversed(range(N)):  # best[j] is for the last j layers
        (bodies, runs), rest = best[-1]
        options = [((bodies + 1, runs), [(1, 1), *rest])]
        lengths = range(1, (N - start) // 2 + 1) if period is None else (period,)
        for length in lengths:
            first = kinds[start : start + length]
            end = start + length
            while len(first) == length and kinds[end : end + length] == first:
                end += length
                (bodies, runs), rest = best[N - end]
                repeats = (end - start) // length
                options.append(((bodies + length, runs + 1), [(length, repeats), *rest]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]
