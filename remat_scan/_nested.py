"""`Nested`: checkpoints inside checkpoints, so that fewer layer inputs are kept at a time.

A schedule is a tree. A layer (or a boundary of several) is `1`; a segment is the tuple of what runs in
it, one after the other. Each of these is a checkpoint: it keeps its input, and in the backward pass
runs what is in it once more, in order to keep the inputs of those in turn. `(1, 1, 1, 1)` is a flat
stack, `((1, 1), (1, 1))` one of two levels.
"""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Tree: TypeAlias = int | tuple[Any, ...]  # of trees


@dataclasses.dataclass(frozen=True)
class Nested:
    """A schedule for [`remat_scan.run_stack`][] that keeps few layer inputs and runs layers more often.

    ```python
    y = run_stack(blocks, x, schedule=Nested()).x           # about 2√N layer inputs instead of N
    y = run_stack(blocks, x, schedule=Nested(levels=3)).x   # about 3∛N
    y = run_stack(blocks, x, schedule=Nested(states=6)).x   # 6, whatever N is

    Nested(states=6).kept(64), Nested(states=6).evaluations(64)  # (6, 237)
    ```

    A checkpointed layer keeps its input, so a stack of N layers keeps N of them. Here segments of
    layers are checkpoints too, and the layers in a segment keep their inputs only while the backward
    pass is in it. With `levels=2` that is

    ```python
    def run_stack(layers, x):
        for start in range(0, N, size):  # of the segments, √N
            x = checkpointed_layer(run_layers)(layers[start : start + size], x)
        return x

    def run_layers(layers, x):
        for layer in layers:
            x = checkpointed_layer(layer)(x)
        return x
    ```

    What it costs, where flat checkpointing keeps N inputs and runs each layer forward twice (2 N times
    in all, and once backward):

    | | layer inputs kept at a time | forward runs of a layer |
    |---|---|---|
    | `levels=2` | 2 √N − 1 | 3 N − √N |
    | `levels=k` | k N^(1/k) − (k − 1) | at most (k + 1) N |
    | `states=s` | s | (r + 1) N + 1 − C(s − 1 + r, r − 1) |

    in which C(n, k) is the binomial coefficient, r the least number for which C(s − 1 + r, r) ≥ N, and
    √N and N^(1/k) stand for segments of equal sizes;
    `kept` and `evaluations` give the exact numbers for any N. The forward runs of the last line are the
    fewest that are possible (Griewank and Walther, "Algorithm 799: Revolve", 2000, which calls `s - 1`
    the number of checkpoints and does not count the state at work).
    In a stack whose forward pass is a third of the FLOPs of a step without checkpoints, flat
    checkpointing costs 4/3 of that step and `levels=k` at most (k + 3)/3.

    **Arguments:**

    - `levels`: how deep the checkpoints are nested; 1 is flat, 2 (the default) has segments of about √N
      layers. Sizes are chosen such that the fewest inputs are kept.
    - `states`: instead of that, how many layer inputs may be kept at a time, at least 2. Segments then
      have the sizes of the binomial schedule. For N layers, `states=N` is flat.

    **Raises:** `ValueError` if both are given, `levels` is below 1, or `states` below 2.
    """

    levels: int | None = None
    states: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and self.states is not None:
            raise ValueError(
                f"Nested(levels={self.levels}, states={self.states}): give one of them. The number of "
                "states decides how deep the checkpoints are nested."
            )
        if self.states is None and self.levels is None:
            object.__setattr__(self, "levels", 2)
        for name, given, least in (("levels", self.levels, 1), ("states", self.states, 2)):
            if given is not None and (not isinstance(given, int) or given < least):
                raise ValueError(f"Nested({name}={given!r}): a whole number of at least {least}.")

    def kept(self, layers: int) -> int:
        """How many layer inputs are alive at the peak.

        **Arguments:**

        - `layers`: how many there are; where `run_stack` has a `boundary`, how many boundaries.
        """
        return _kept(self.tree(layers))

    def evaluations(self, layers: int) -> int:
        """How often layers run forward in one gradient: in the forward pass, and recomputed.

        Exact for a list of layers under `isolation="barrier"` and `"none"`: when the inputs of the
        parts of a segment are wanted, the last part is not run. Inside a loop it is: under
        `isolation="loop"` and in a [`remat_scan.Stacked`][] it is `(levels + 1) * layers` in all where
        segments have equal sizes.

        **Arguments:**

        - `layers`: as for `kept`.
        """
        return layers + sum(_evaluations(child) for child in self.tree(layers))

    def tree(self, layers: int) -> tuple[Tree, ...]:
        """The schedule as nested tuples: 1 is a layer, a tuple a segment."""
        if layers < 1:
            return ()
        if self.states is not None:
            return _binomial_tree(layers, self.states - 1)
        return _level_tree(layers, self.levels or 1)


def size_of(tree: Tree) -> int:
    """How many layers there are in it."""
    return 1 if isinstance(tree, int) else sum(map(size_of, tree))


def _kept(tree: Tree) -> int:
    """Its own input, those of its children before the one that is at work, and what that one keeps."""
    if isinstance(tree, int):
        return 1
    return max((i + _kept(child) for i, child in enumerate(tree)), default=0)


def _evaluations(tree: Tree) -> int:
    """In the backward pass. What the last child returns is needed by nobody there."""
    if isinstance(tree, int):
        return 1
    return size_of(tree[:-1]) + sum(map(_evaluations, tree))


# -- Levels ----------------------------------------------------------------------------------------


def _level_tree(layers: int, levels: int) -> tuple[Tree, ...]:
    if levels == 1:
        return (1,) * layers
    sizes = _segments(layers, levels)
    return tuple(1 if size == 1 else _level_tree(size, levels - 1) for size in sizes)


@ft.lru_cache(maxsize=4096)
def _segments(layers: int, levels: int, each: int = 1) -> tuple[int, ...]:
    """The sizes of segments of which the fewest inputs are kept, all equal if that costs nothing.

    `each` is how many inputs one layer keeps when it is at work: 1, but for the period of a `Stacked`.
    """

    def cost(count: int) -> tuple[int, bool, int]:
        inside = _kept_by_levels(-(-layers // count), levels - 1, each)
        return count - 1 + inside, layers % count != 0, -count

    count = min(range(min(2, layers), layers + 1), key=cost)
    small, larger = divmod(layers, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def _kept_by_levels(layers: int, levels: int, each: int) -> int:
    if levels == 1 or layers == 1:
        return layers * each
    sizes = _segments(layers, levels, each)
    return len(sizes) - 1 + _kept_by_levels(sizes[0], levels - 1, each)


# -- States ----------------------------------------------------------------------------------------


def _binomial_tree(layers: int, snapshots: int) -> tuple[Tree, ...]:
    """The optimal schedule of Griewank and Walther, with their number of snapshots.

    They are the inputs of the children but the last, which is one layer and at work at once.
    """
    children: list[Tree] = []
    while layers > 1:
        size = _split(layers, snapshots)
        children.append(1 if size == 1 else _binomial_tree(size, snapshots))
        layers, snapshots = layers - size, snapshots - 1
    return (*children, 1)


@ft.lru_cache(maxsize=4096)
def _split(layers: int, snapshots: int) -> int:
    """How far to go to the next snapshot, so that the fewest steps are taken in all."""

    def cost(size: int) -> int | float:
        return size + _advances(size, snapshots) + _advances(layers - size, snapshots - 1)

    return min(range(1, layers), key=cost)


@ft.lru_cache(maxsize=4096)
def _advances(layers: int, snapshots: int) -> int | float:
    """Steps without differentiation that reversing so many layers takes: r N − C(s + r, r − 1)."""
    if layers == 1:
        return 0
    if snapshots == 0:
        return math.inf
    r = next(r for r in itertools.count(1) if math.comb(snapshots + r, r) >= layers)
    return r * layers - math.comb(snapshots + r, r - 1)


# -- Stacked layers --------------------------------------------------------------------------------


def nested_scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int,
    levels: int,
    each: int = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` with checkpointed segments, as loops in loops.

    **Arguments:**

    - `body`: one step, of which `each` checkpoints are the parts.
    - `levels`: of checkpoints, the ones in `body` included.
    """
    if levels == 1 or length == 1:
        return jax.lax.scan(body, carry, xs, length)
    start, results = 0, []
    for size, group in itertools.groupby(_segments(length, levels, each)):
        count = len(list(group))
        part = xs
        if size * count < length:
            part = jax.tree.map(lambda a: a[start : start + size * count], xs)
        if size == each == 1:
            carry, ys = jax.lax.scan(body, carry, part)
        else:
            carry, ys = _scan_segments(body, carry, part, size, count, levels, each)
        start += size * count
        results.append(ys)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _scan_segments(
    body: Any, carry: Any, xs: Any, size: int, count: int, levels: int, each: int
) -> tuple[Any, Any]:
    """A scan over `count` segments of `size` steps each."""

    def segment(carry: Any, xs: Any) -> tuple[Any, Any]:
        return nested_scan(body, carry, xs, size, levels - 1, each)

    # XLA inlines a loop that runs once; the recomputation must then not be merged with what it repeats.
    checkpointed = jax.checkpoint(segment, prevent_cse=count == 1)
    xs = jax.tree.map(lambda a: jnp.reshape(a, (count, size, *a.shape[1:])), xs)
    carry, ys = jax.lax.scan(checkpointed, carry, xs, count)
    return carry, jax.tree.map(lambda y: jnp.reshape(y, (count * size, *y.shape[2:])), ys)
