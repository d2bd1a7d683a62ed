"""`blockwise`: a function that treats each token alone, run block by block."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._layer import _run
from ._policies import resolve
from ._trace import Program, is_array, trace

P = ParamSpec("P")
R = TypeVar("R")


@overload
def blockwise(
    fn: Callable[P, R],
    /,
    *,
    size: int,
    axis: Any,
    out: Any = None,
    shards: int | None = None,
    accumulate: DTypeLike | None = "float32",
) -> Callable[P, R]: ...
@overload
def blockwise(
    fn: None = None,
    /,
    *,
    size: int,
    axis: Any,
    out: Any = None,
    shards: int | None = None,
    accumulate: DTypeLike | None = "float32",
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def blockwise(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    size: int,
    axis: Any,
    out: Any = None,
    shards: int | None = None,
    accumulate: DTypeLike | None = "float32",
) -> Callable[..., Any]:
    """Runs a function that treats each token alone block by block, forward and backward, so that its
    working set is that of one block.

    ```python
    def blockwise(fn, size, axis, out):
        def wrapped(*args, **kwargs):
            cuts = list(range(size, args[0].shape[axis], size))
            blocks = zip(*(jnp.split(x, cuts, axis) for x in args))
            results = [fn(*block, **kwargs) for block in blocks]
            return sum(results) if out == "sum" else jnp.concatenate(results, out)
        return wrapped
    ```

    An MLP, a router, the whole token-wise half of a transformer layer, or the loss over a large
    vocabulary are such functions:

    ```python
    h = blockwise(mlp, axis=1, size=4096)(h)  # h: [batch, tokens, width]; mlp: an equinox.Module

    @blockwise(axis=(None, 1, 1), out="sum", size=1024)
    def loss(table, h, labels):  # the logits of 1024 tokens at a time
        counts = labels >= 0
        nll = optax.softmax_cross_entropy_with_integer_labels(h @ table.T, labels)
        return jnp.sum(nll, where=counts), jnp.sum(counts)

    total, count = loss(table, h, labels)
    mean = total / count
    ```

    Each block is a checkpoint: only the function's inputs are kept for the backward pass. Inside a
    [`remat_scan.checkpointed_layer`][] that costs no FLOPs: recomputing the layer does not need the
    result of what comes last in it, so the blocks run once forward and once backward. A policy
    around it finds tensors inside `fn` by their names, and keeps them of all blocks.

    **Arguments:**

    - `fn`: the function. Arrays in it (an Equinox module's weights, those of a bound method or of a
      `functools.partial`), arrays that it closes over, and keyword arguments go whole to each block.
    - `size`: how many elements along `axis` make a block; where they do not divide the length, the
      last block is smaller.
    - `axis`: the axis to cut the positional arguments along: one for all, or a tuple with one entry
      for each; an entry may be a pytree prefix of the argument, as in `jax.vmap`'s `in_axes`. `None`:
      the argument goes whole to each block.
    - `out`: the axis along which the blocks of a result are put together, or `"sum"`: the blocks'
      results are added up; one for all results or a pytree prefix of them. `None`: the same axis as
      that of the arguments. A mean is the quotient of two sums, as above.
    - `shards`: how many devices the axis is split over. A block then takes an equal share from each
      device's part, so that nothing moves between devices; `size` is still that of all devices
      together. Not needed if another axis is the split one, inside `jax.shard_map`, or under explicit
      sharding, where the arrays' types tell.
    - `accumulate`: gradients of what goes whole to each block, and summed results, are added up in
      this dtype unless their own is wider; `None`: in their own.

    **Returns:**

    A callable with the name, docstring and signature of `fn`. Differentiable any number of times, in
    forward and reverse mode.

    **Raises:** `ValueError` for a size that is not positive or no multiple of the shards, and, when
    called, for an axis that an array does not have, lengths that differ, or results whose length is
    not their block's; `TypeError` if `fn` is not callable.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"blockwise: size={size!r} must be a whole number of at least 1.")
    if shards is not None and (shards < 1 or size % shards):
        raise ValueError(
            f"blockwise: size={size} must be a multiple of shards={shards}: each block takes the same "
            "share from each device."
        )
    options = {
        "size": size,
        "axis": axis,
        "out": out,
        "shards": shards,
        "accumulate": None if accumulate is None else jnp.dtype(accumulate).name,
    }
    if fn is None:
        return ft.partial(blockwise, **options)
    if not callable(fn):
        raise TypeError(
            f"blockwise wraps a callable, got {fn!r}. Options are keywords: "
            "@blockwise(axis=1, size=4096)."
        )
    blocks = _Blocks(fn, **options)
    if not jax.tree_util.all_leaves([fn]):
        return eqx.module_update_wrapper(_BlockwiseModule(blocks))

    @ft.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _run(blocks, _NO_POLICY, "none", args, kwargs)

    return wrapped


_NO_POLICY = resolve("none")


class _BlockwiseModule(eqx.Module):
    """A callable pytree run in blocks: still a pytree with the same arrays."""

    _blocks: "_Blocks"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._blocks.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self._blocks, _NO_POLICY, "none", args, kwargs)


class _Blocks(eqx.Module):
    """The loop over blocks.

    How blocks are cut and put back is decided by what compiles, and compiles small. A block is a
    dynamic slice along its axis, taken inside the block's checkpoint; a result is written into its
    place in the loop's carry. Neither moves data, along any axis, and what is kept for the backward
    pass is the arguments themselves, not a second copy of them in blocks. (The other way, a scan over
    the blocks as `xs`, needs a transpose before and after unless the axis is the first. Along the
    sequence it has made the TPU compiler abort, and never compiled smaller there.)

    Differentiated as it stands, the slice would give a zero-filled array of full size, with one block
    in it, to be added to the carry in each step. XLA rewrites that sum into an update of the block
    in its place, on TPU and GPU and, in float32, on CPU; `_put` takes care that the other direction
    looks the same.
    """

    fn: Callable[..., Any]
    size: int = eqx.field(static=True)
    axis: Any = eqx.field(static=True)
    out: Any = eqx.field(static=True)
    shards: int | None = eqx.field(static=True)
    accumulate: str | None = eqx.field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        axes = self._axes(args)
        cut = {i: a for i, a in enumerate(axes) if a is not None}
        length, shards = self._length_and_shards(leaves, cut)

        def program_of(size: int) -> Program:
            block = list(leaves)
            for i, a in cut.items():
                block[i] = jax.lax.slice_in_dim(leaves[i], 0, size, axis=a)
            return trace(self.fn, jax.tree.unflatten(treedef, block), kwargs)

        def whole(program: Program) -> list[Any]:
            """The operands of the block's program, with uncut arrays."""
            arrays = [x for x in leaves if is_array(x)]
            first = program.num_weights
            operands = [*program.operands]
            operands[first : first + len(arrays)] = arrays
            return operands

        if length <= self.size:
            program = program_of(length)
            return program.unflatten(jax.checkpoint(program.evaluator())(*whole(program)))

        program = program_of(self.size)
        outs = self._outs(program, cut, self.size)
        arrays = [i for i, x in enumerate(leaves) if is_array(x)]
        operand_axes: list[int | None] = [None] * len(program.operands)
        for o, i in enumerate(arrays, start=program.num_weights):
            operand_axes[o] = axes[i]

        split = ft.partial(_split, shards=shards)
        wide = _Wide(self.accumulate)

        def run(program: Program, start: Any, share: int, prevent_cse: bool) -> list[Any]:
            """One block: `share` elements of each shard, from `start` on."""
            operands = []
            for x, a in zip(whole(program), operand_axes, strict=True):
                operands.append(wide.operand(x) if a is None else split(x, a))

            def block(operands: list[Any], start: Any) -> list[Any]:
                inputs = []
                for x, a, t in zip(operands, operand_axes, program.in_types, strict=True):
                    inputs.append(wide.use(x, t) if a is None else _cut(x, a, start, share))
                return program.evaluator()(*inputs)

            return jax.checkpoint(block, prevent_cse=prevent_cse)(operands, start)

        def step(results: list[Any], outputs: list[Any], start: Any) -> list[Any]:
            return [
                r + x.astype(r.dtype) if a == "sum" else _put(r, split(x, a), start, a + 1)
                for r, x, a in zip(results, outputs, outs, strict=True)
            ]

        share = self.size // shards
        count, rest = divmod(length // shards, share)
        results = [
            _zeros(t, _wider(t.dtype, self.accumulate))
            if a == "sum"
            else _zeros(t, t.dtype, a, (shards, length // shards))
            for t, a in zip(program.out_types, outs, strict=True)
        ]
        # The programs of the full blocks and of the rest share one set of accumulators.
        if count == 1:
            results = step(results, run(program, 0, share, True), 0)
        else:

            def body(results: list[Any], i: Any) -> tuple[list[Any], None]:
                start = i * share
                return step(results, run(program, start, share, False), start), None

            for x, a in zip(whole(program), operand_axes, strict=True):
                if a is None:
                    wide.operand(x)  # made outside of the loop
            results, _ = jax.lax.scan(body, results, jnp.arange(count))
        if rest:
            last = program_of(rest * shards)
            self._outs(last, cut, rest * shards)
            start = count * share
            results = step(results, run(last, start, rest, True), start)
        return program.unflatten(
            [
                r.astype(t.dtype) if a == "sum" else _merge(r, a)
                for r, t, a in zip(results, program.out_types, outs, strict=True)
            ]
        )

    def _axes(self, args: tuple[Any, ...]) -> list[int | None]:
        """For each leaf of the arguments the axis it is cut along, counted from the front."""
        axes: list[int | None] = []
        given = _spread(self.axis, args, f"{self._label}: axis={self.axis!r}", "arguments")
        for x, a in zip(jax.tree.leaves(args), given, strict=True):
            if a is not None and not _is_int(a):
                raise ValueError(
                    f"{self._label}: axis={self.axis!r} must consist of whole numbers and None."
                )
            axes.append(self._front(a, x, "an argument") if a is not None and is_array(x) else None)
        if all(a is None for a in axes):
            raise ValueError(
                f"{self._label}: axis={self.axis!r} cuts no array of {len(args)} positional "
                "argument(s): pass at least one array to cut by position."
            )
        return axes

    def _length_and_shards(self, leaves: list[Any], cut: dict[int, int]) -> tuple[int, int]:
        lengths = {jnp.shape(leaves[i])[a] for i, a in cut.items()}
        if len(lengths) > 1:
            raise ValueError(
                f"{self._label}: the arrays to cut have the lengths {sorted(lengths)} along "
                f"axis={self.axis!r}; give them the same one, or axis=None to what goes whole to "
                "each block."
            )
        (length,) = lengths
        shards = self.shards
        if shards is None:
            shards = max(_num_shards(leaves[i], a) for i, a in cut.items())
        if length > self.size and (length % shards or self.size % shards):
            raise ValueError(
                f"{self._label}: the length {length} and size={self.size} must be multiples of the "
                f"{shards} shards: each block takes the same share from each device."
            )
        return length, shards

    def _outs(self, program: Program, cut: dict[int, int], size: int) -> list[Any]:
        """For each array among the results `"sum"` or its axis, counted from the front."""
        out = self.out
        if out is None:
            given = set(jax.tree.leaves(self.axis))
            if len(given) > 1:
                raise ValueError(
                    f"{self._label}: the arguments are cut along different axes, "
                    f"axis={self.axis!r}; say with out= along which axis the results are."
                )
            (out,) = given
        outs = []
        results = program.unflatten(program.out_types)
        spread = _spread(out, results, f"{self._label}: out={out!r}", "results")
        for t, a in zip(jax.tree.leaves(results), spread, strict=True):
            if not isinstance(t, jax.core.ShapedArray):
                continue  # a static result
            if a == "sum":
                if not jnp.issubdtype(t.dtype, jnp.number):
                    raise ValueError(
                        f"{self._label}: a result of dtype {t.dtype.name} cannot be summed over the "
                        "blocks; return a number."
                    )
                outs.append(a)
                continue
            if not _is_int(a):
                raise ValueError(f'{self._label}: out={out!r} must consist of axes and "sum".')
            a = self._front(a, t, "a result")
            if t.shape[a] != size:
                raise ValueError(
                    f"{self._label}: a block of {size} elements gave a result of shape {t.shape}, "
                    f'which has {t.shape[a]} along axis {a}; choose another out=, or "sum".'
                )
            outs.append(a)
        return outs

    def _front(self, axis: int, x: Any, what: str) -> int:
        ndim = jnp.ndim(x)
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"{self._label}: {what} of shape {jnp.shape(x)} has no axis {axis}; give None in "
                'axis= to what goes whole to each block, and "sum" in out= to what is added up.'
            )
        return axis % ndim

    @property
    def _label(self) -> str:
        return f"blockwise({self.__name__})"


class _Wide:
    """What goes whole to each block, in the dtype in which the loop adds up its gradient.

    The gradient of what a loop's body reads from outside is added up in the loop's carry, in the
    dtype that the body reads: so it reads a wider copy.
    """

    def __init__(self, accumulate: str | None) -> None:
        self._accumulate = accumulate
        self._made: dict[int, tuple[Any, Any]] = {}  # with the array, so that its id stays taken

    def operand(self, x: Any) -> Any:
        if id(x) not in self._made:
            t = jax.typeof(x)
            dtype = _wider(t.dtype, self._accumulate) if hasattr(t, "dtype") else None
            wide = x if dtype in (None, t.dtype) else jnp.asarray(x, dtype)
            self._made[id(x)] = (x, wide)
        return self._made[id(x)][1]

    def use(self, x: Any, t: Any) -> Any:
        """Back to the type that the program expects."""
        return x if jax.typeof(x).dtype == t.dtype else x.astype(t.dtype)


def _wider(dtype: Any, accumulate: str | None) -> Any:
    if accumulate is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.promote_types(dtype, accumulate)


def _is_int(a: Any) -> bool:
    return isinstance(a, int) and not isinstance(a, bool)


def _spread(prefix: Any, tree: Any, given: str, of: str) -> list[Any]:
    """The leaf of the prefix for each leaf of the tree."""
    spread: list[Any] = []

    def add(leaf: Any, subtree: Any) -> None:
        spread.extend([leaf] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(add, prefix, tree, is_leaf=lambda x: x is None)
    except ValueError as e:
        raise ValueError(
            f"{given} must be one entry, or a pytree prefix of the {of}, "
            f"{jax.tree.structure(tree)}. {e}"
        ) from None
    return spread


# -- Arrays of which one axis is split into shards ------------------------------------------------


def _spec(x: Any) -> tuple[Any, ...]:
    """The explicit sharding of each axis; `None` where the compiler decides."""
    return tuple(jax.typeof(x).sharding.spec)


def _num_shards(x: Any, axis: int) -> int:
    names = _spec(x)[axis] or ()
    sizes = jax.typeof(x).sharding.mesh.shape
    return math.prod(sizes[n] for n in ((names,) if isinstance(names, str) else names))


def _reshape(x: Any, shape: Sequence[int], spec: Sequence[Any]) -> Any:
    out_sharding = jax.sharding.PartitionSpec(*spec) if any(spec) else None
    return jnp.reshape(x, shape, out_sharding=out_sharding)


def _split(x: Any, axis: int, shards: int) -> Any:
    """[.., n, ..] as [.., shards, n / shards, ..]."""
    shape, spec = list(jnp.shape(x)), _spec(x)
    shape[axis : axis + 1] = [shards, shape[axis] // shards]
    return _reshape(x, shape, (*spec[: axis + 1], None, *spec[axis + 1 :]))


def _merge(x: Any, axis: int) -> Any:
    """Undoes `_split`."""
    shape, spec = list(jnp.shape(x)), _spec(x)
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    return _reshape(x, shape, (*spec[: axis + 1], *spec[axis + 2 :]))


def _cut(x: Any, axis: int, start: Any, share: int) -> Any:
    """The block of a split array: `share` elements of each shard."""
    return _merge(jax.lax.dynamic_slice_in_dim(x, start, share, axis + 1), axis)


def _put(result: Any, x: Any, start: Any, axis: int) -> Any:
    """Writes a block into its place. The transpose is a slice, and an update of the same place with
    zeros."""
    return jax.lax.dynamic_update_slice_in_dim(result, x, start, axis)


def _zeros(
    t: Any, dtype: Any, axis: int | None = None, split_shape: tuple[int, int] | None = None
) -> Any:
    """Zeros of a result's type: sharded, and varying inside `jax.shard_map`, as that is."""
    shape, spec = list(t.shape), t.sharding.spec
    if axis is not None and split_shape is not None:
        shape[axis : axis + 1] = split_shape
        spec = (*spec[: axis + 1], None, *spec[axis + 1 :])
    sharding = jax.sharding.PartitionSpec(*spec) if any(spec) else None
    zeros = jnp.zeros(shape, dtype, out_sharding=sharding)
    varying = tuple(t.manual_axis_type.varying)
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros
