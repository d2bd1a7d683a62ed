"""The two XLA mechanisms that keep two layers' backward working sets apart.

The only file that knows attribute names. Both work on a flat function from operands to outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import jax.ref
from jax.experimental.xla_metadata import set_xla_metadata

from ._host import on_host

Isolation: TypeAlias = Literal["loop", "barrier", "both", "none"]
ISOLATIONS: tuple[Isolation, ...] = ("loop", "barrier", "both", "none")

# XLA's while-loop simplifier inlines a loop that runs once unless it finds this.
LOOP_TAG = "skip-simplify-while-loops_trip-count-one"

_UNLIKE_VARYING = (
    'isolation="barrier" inside jax.shard_map needs a newer jax: under jax '
    f"{jax.__version__} a barrier over operands of which some vary over the mesh and some do not makes "
    'all of them vary. Use isolation="loop", jax>=0.12, or jax.shard_map(..., check_vma=False).'
)

Flat: TypeAlias = Callable[..., Sequence[Any]]


def check_isolation(isolation: object) -> None:
    if isolation not in ISOLATIONS:
        raise ValueError(
            f"isolation={isolation!r} is not one of {', '.join(map(repr, ISOLATIONS))}."
        )


def isolate(
    fn: Flat, in_types: Sequence[Any], out_types: Sequence[Any], streams_from: int, isolation: str
) -> Flat:
    """`fn` behind the boundary that `isolation` names.

    **Arguments:**

    - `fn`: a flat function of operands with the abstract values `in_types`, to `out_types`.
    - `streams_from`: the operands from here on are a call's arguments, the ones before are weights.
    """
    if isolation in ("loop", "both"):
        fn = _in_loop(fn, in_types, out_types, streams_from)
    if isolation in ("barrier", "both"):
        fn = _behind_barrier(fn, in_types)
    return fn


def _behind_barrier(fn: Flat, in_types: Sequence[Any]) -> Flat:
    """A barrier over all operands; its transpose is one over all their cotangents.

    So the layer starts when all operands exist, and in the backward pass the layer before starts
    when this layer's weight gradients exist too. XLA drops operands of a barrier whose results
    nobody reads; every cotangent here has a reader, the optimiser or the layer before.
    """

    def with_barrier(*operands: Any) -> Sequence[Any]:
        inner = list(operands)
        held = [i for i, t in enumerate(in_types) if not _is_mutable(t)]
        for i, x in zip(held, jax.lax.optimization_barrier([inner[i] for i in held]), strict=True):
            if jax.typeof(x) != jax.typeof(inner[i]):
                raise NotImplementedError(_UNLIKE_VARYING)
            inner[i] = x
        return fn(*inner)

    return with_barrier


def _in_loop(
    fn: Flat, in_types: Sequence[Any], out_types: Sequence[Any], streams_from: int
) -> Flat:
    """The body of a loop that runs once, tagged so that XLA keeps it.

    How operands and outputs travel is decided by what compiles smaller:

    - an output with the type of an argument takes over that argument's place in the carry: the stream
      of activations is updated in place;
    - other operands are `xs`, so that their cotangents leave the backward loop as `ys` instead of
      being added up in its carry;
    - other outputs are `ys`;
    - operands in host memory are closed over: slicing them would need a copy on the device; and so
      are mutable arrays, which can't be copied.
    """
    slots = streams(in_types, out_types, streams_from)
    carried = list(slots.values())
    stacked = [i for i, t in enumerate(in_types) if i not in carried and not _stays_put(t)]
    others = [o for o in range(len(out_types)) if o not in slots]

    def in_loop(*operands: Any) -> Sequence[Any]:
        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = list(operands)  # what is not replaced below is closed over
            for i, x in zip(carried + stacked, carry + xs, strict=True):
                inner[i] = x
            outputs = fn(*inner)
            return [outputs[o] for o in slots], [outputs[o] for o in others]

        carry = [operands[i] for i in carried]
        xs = [jnp.expand_dims(operands[i], 0) for i in stacked]
        # Bound under the tag, not only traced under it: the backward loop inherits it from here.
        with set_xla_metadata(**{LOOP_TAG: "true"}):
            carry, ys = jax.lax.scan(body, carry, xs, length=1)
        outputs: list[Any] = [None] * len(out_types)
        for o, y in zip(slots, carry, strict=True):
            outputs[o] = y
        for o, y in zip(others, ys, strict=True):
            outputs[o] = jnp.squeeze(y, 0)
        return outputs

    return in_loop


def streams(in_types: Sequence[Any], out_types: Sequence[Any], streams_from: int) -> dict[int, int]:
    """Which argument each output continues: the first of its type, each once; never a weight."""
    free = [i for i in range(streams_from, len(in_types)) if not _stays_put(in_types[i])]
    slots: dict[int, int] = {}
    for o, out_type in enumerate(out_types):
        for i in free:
            if in_types[i] == out_type:
                slots[o] = i
                free.remove(i)
                break
    return slots


def _stays_put(aval: Any) -> bool:
    return _is_mutable(aval) or on_host(aval)


def _is_mutable(aval: Any) -> bool:
    return isinstance(aval, jax.ref.AbstractRef)
