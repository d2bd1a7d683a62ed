"""Finding layers in a traced program: what was asked of the compiler, before it did anything."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from ._host import on_host
from ._isolation import LOOP_TAG
from ._memory import traced_sharding
from ._trace import is_array

MARK = "remat_scan.layer."  # in the names of operations: which region they belong to

MATMULS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "pallas_call",
     "scaled_matmul_wrapper", "ffi_call", "custom_call"}
)  # fmt: skip
# Operations that no compiler drops as trivial, for layers without matrix products.
COSTLY = frozenset(
    {"tanh", "exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "erf", "logistic", "rsqrt", "sqrt",
     "pow", "cumsum", "sort", "fft"}
)  # fmt: skip

MARKED = re.compile(re.escape(MARK) + r"(\d+)")
_JAX = next(iter(jax.__path__))
_HERE = os.path.dirname(os.path.abspath(__file__))
_LAYER, _TRACE, _ISOLATION = (
    os.path.join(_HERE, f"_{n}.py") for n in ("layer", "trace", "isolation")
)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One pass through one layer: its forward pass, its backward pass, or its recomputation.

    **Attributes:**

    - `phase`: `"forward"`, `"backward"`, or `"recompute"` inside the backward pass of a checkpoint
      that encloses the layer.
    - `wrapped`: whether this library made it; otherwise it is a plain `jax.checkpoint`.
    - `loop`, `barrier`: whether the traced program has one, and whether somebody reads the barrier.
    - `bare`: for the backward pass behind a barrier, how many cotangents do not go through it.
    - `checkpoint`: `"inside"`, `"outside"` or `"missing"`, for a backward pass.
    - `matmuls`, `costly`: matrix products, and what else no compiler drops; `again`, `costly_again`:
      those in the recomputation.
    - `parent`: the region that it is in.
    """

    number: int
    parent: int | None
    name: str
    phase: str
    source: str
    wrapped: bool
    loop: bool
    barrier: bool
    bare: int
    checkpoint: str
    matmuls: int
    costly: int
    again: int
    costly_again: int
    equation: Any
    scope: Any


def find_regions(closed: Any) -> tuple[Any, list[Region], list[tuple[str, str]]]:
    """Names every region of a traced program, so that it is found again in the compiled one.

    **Returns:**

    The same program with `MARK` and a number in the names of the operations of each region; the
    regions; and `(layer, the user's line)` for each call of a wrapped layer without its wrapper.
    """
    finder = _Finder()
    marked = finder.program(closed.jaxpr, "", False)
    return closed.replace(jaxpr=marked), finder.regions, _not_wrapped(closed.jaxpr, finder.regions)


def is_layer(eqn: Any) -> bool:
    """Whether this library's wrapper made the equation."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    return _made_by(eqn) == _LAYER


def is_checkpoint(eqn: Any) -> bool:
    return eqn.primitive.name.startswith(("remat", "checkpoint")) and "policy" in eqn.params


def is_ours(eqn: Any) -> bool:
    """Whether this library's own code made the equation, not the user's."""
    return _made_by(eqn).startswith(_HERE + os.sep + "_")


def _is_own_loop(eqn: Any) -> bool:
    at = next((f for f in frames(eqn) if not _in(f, _JAX)), None)
    return (
        at is not None
        and at.file_name == _ISOLATION
        and at.function_name.rpartition(".")[2] == "in_loop"
    )


def _made_by(eqn: Any) -> str:
    """The file of the innermost line that is not JAX's."""
    return next((f.file_name for f in frames(eqn) if not _in(f, _JAX)), "")


def is_barrier(eqn: Any) -> bool:
    """A barrier that stands for this library's isolation: not one of the user's or of JAX, nor one
    that ties copies to the host."""
    if eqn.primitive.name != "optimization_barrier" or not is_ours(eqn):
        return False
    return not any(on_host(v.aval) for v in eqn.outvars)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The programs inside an equation, as open jaxprs."""
    for value in eqn.params.values():
        for v in value if isinstance(value, tuple | list) else (value,):
            if _is_closed(v) or isinstance(v, jex.Jaxpr):
                yield getattr(v, "jaxpr", v)


def walk(jaxpr: Any, stack: str = "") -> Iterator[tuple[Any, str]]:
    """All equations with their name stacks; inner layers are not entered."""
    for eqn in jaxpr.eqns:
        here = f"{stack}/{eqn.source_info.name_stack}"
        yield eqn, here
        if not is_layer(eqn):
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, here)


def frames(eqn: Any) -> Any:
    traceback = eqn.source_info.traceback
    return () if traceback is None else traceback.frames


def users_line(eqn: Any) -> str:
    """The innermost of the user's own lines."""
    for f in frames(eqn):
        if not (_in(f, _JAX) or _in(f, _HERE) or "site-packages" in f.file_name):
            return f"{f.file_name}:{f.line_num}"
    return ""


def _tagged(eqn: Any) -> bool:
    return LOOP_TAG in (getattr(eqn.ctx, "xla_metadata", None) or {})


def _is_closed(value: Any) -> bool:
    return hasattr(value, "jaxpr") and hasattr(value, "consts")


def _in(frame: Any, folder: str) -> bool:
    name = frame.file_name
    if folder == _HERE:  # the package's own private modules
        return name.startswith(folder + os.sep + "_")
    return name.startswith((folder, "<frozen"))


def paired(regions: Sequence[Region]) -> list[list[Region]]:
    """The passes of each layer: its forward pass first, then those that read what it left."""
    rows = [[r] for r in regions if r.phase == "forward"]
    alone: list[list[Region]] = []  # a plain jax.checkpoint has no forward pass of its own
    for region in (r for r in regions if r.phase != "forward"):
        reads = {v for v in region.equation.invars if isinstance(v, jex.Var)}

        def shared(row: list[Region], region: Region = region, reads: Any = reads) -> int:
            first = row[0]
            if first.name != region.name or any(r.phase == region.phase for r in row):
                return -1
            if first.scope is not region.scope:
                return 0
            return sum(v in reads for v in (*first.equation.invars, *first.equation.outvars)
                       if isinstance(v, jex.Var))  # fmt: skip

        # The last of equals: where nothing links them, the backward passes come in reverse.
        best = max(reversed(rows), key=shared, default=None)
        if best is None or shared(best) < 0:
            alone.append([region])
        else:
            best.append(region)
    return rows + alone[::-1]


def flat_program(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[Any], list[jax.ShapeDtypeStruct], list[bool]]:
    """A call as a function of its arrays alone.

    **Returns:**

    The function, from arrays to arrays; its arrays, as given; the same as abstract values; and which
    leaves of `(args, kwargs)` they are.

    **Raises:** `NotImplementedError` under `jax_remat3`.
    """
    if getattr(jax.config, "jax_remat3", False):
        raise NotImplementedError(
            "jax_remat3 is on, and verify, residuals and lint would misread the form that checkpoints "
            "have with it. The wrappers and memory_report do work. For the others first call "
            "jax.config.update('jax_remat3', False), or unset JAX_REMAT3."
        )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    arrays = [x for x, d in zip(leaves, dynamic, strict=True) if d]
    meshes: dict[Any, Any] = {}
    avals = [
        jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=traced_sharding(x, meshes))
        for x in arrays
    ]

    def program(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        merged = [next(rest) if d else x for x, d in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if is_array(x)]

    return program, arrays, avals, dynamic


class _Finder:
    def __init__(self) -> None:
        self.regions: list[Region] = []

    def program(self, jaxpr: Any, stack: str, checkpointed: bool) -> Any:
        """`jaxpr` with the names of regions, or itself where there is none."""
        eqns = [self._equation(jaxpr, eqn, stack, checkpointed) for eqn in jaxpr.eqns]
        if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return jaxpr.replace(eqns=eqns)

    def _equation(self, scope: Any, eqn: Any, stack: str, checkpointed: bool) -> Any:
        stack = f"{stack}/{eqn.source_info.name_stack}"
        number = None
        # Differentiating a scan moves what is the same in each step out of it: no part of a layer.
        if is_layer(eqn) and any(isinstance(v, jex.Var) for v in eqn.invars):
            number = self._region(scope, eqn, stack, checkpointed)
        elif is_checkpoint(eqn) and eqn.params.get("differentiated"):
            holds_layers = any(is_layer(e) for e, _ in walk(eqn.params["jaxpr"]))
            if not holds_layers and MARK not in stack:
                number = self._region(scope, eqn, stack, checkpointed)
        if number is not None:
            stack += f"/{MARK}{number}"
        checkpointed = checkpointed or (is_checkpoint(eqn) and number is None)
        params = {k: self._param(v, stack, checkpointed) for k, v in eqn.params.items()}
        if any(params[k] is not eqn.params[k] for k in params):
            eqn = eqn.replace(params=params)
        if number is not None:
            info = eqn.source_info
            names = info.name_stack.extend(f"{MARK}{number}")
            eqn = eqn.replace(source_info=info.replace(name_stack=names))
        return eqn

    def _param(self, value: Any, stack: str, checkpointed: bool) -> Any:
        if _is_closed(value):
            inner = self.program(value.jaxpr, stack, checkpointed)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if isinstance(value, jex.Jaxpr):
            return self.program(value, stack, checkpointed)
        if isinstance(value, tuple):
            new = tuple(self._param(v, stack, checkpointed) for v in value)
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        return value

    def _region(self, scope: Any, eqn: Any, stack: str, checkpointed: bool) -> int:
        wrapped = is_layer(eqn)
        inner = next(inner_jaxprs(eqn))
        found = list(walk(inner))
        backward = "transpose(" in stack
        phase = "backward" if backward else "forward"
        if "rematted_computation" in stack:
            phase = "recompute"
        once = [e for e, _ in found if e.primitive.name == "scan" and e.params["length"] == 1]
        # Not one of the user's, which may run once too; its frames are lost when it is traced anew.
        loops = [e for e in once if _is_own_loop(e)] or (
            once if any(_tagged(e) for e, _ in found) else []
        )
        barriers = [e for e in inner.eqns if is_barrier(e)]
        held = {v for e in barriers for v in e.outvars}
        cotangents = [v for v in inner.outvars if not isinstance(v, jex.Literal)]
        checkpoint = "missing"
        if not wrapped or any(is_checkpoint(e) for e, _ in found):
            checkpoint = "inside"
        elif checkpointed:
            checkpoint = "outside"
        work = [(e.primitive.name, "rematted_computation" in s) for e, s in found]
        self.regions.append(
            Region(
                number=len(self.regions),
                parent=int(marks[-1]) if (marks := MARKED.findall(stack)) else None,
                name=eqn.params["name"] if wrapped else _checkpoint_name(eqn),
                phase=phase,
                source=users_line(eqn),
                wrapped=wrapped,
                loop=bool(loops),
                barrier=any(_is_read(e, inner) for e in barriers),
                bare=sum(v not in held for v in cotangents),
                checkpoint=checkpoint,
                matmuls=sum(p in MATMULS for p, _ in work),
                again=sum(p in MATMULS and r for p, r in work),
                costly=sum(p in COSTLY for p, _ in work),
                costly_again=sum(p in COSTLY and r for p, r in work),
                equation=eqn,
                scope=scope,
            )
        )
        return len(self.regions) - 1


def _checkpoint_name(eqn: Any) -> str:
    info = getattr(eqn.params["jaxpr"], "debug_info", None)
    name = getattr(info, "func_name", "") or "?"
    return f"jax.checkpoint({name})"


def _is_read(barrier: Any, jaxpr: Any) -> bool:
    """Whether anybody reads a result of the barrier: XLA drops one that nobody reads."""
    read = {v for e in jaxpr.eqns for v in e.invars if e is not barrier and isinstance(v, jex.Var)}
    read |= {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    return any(v in read for v in barrier.outvars)


def _not_wrapped(jaxpr: Any, regions: list[Region]) -> list[tuple[str, str]]:
    """Lines outside of any region at which the function of a wrapped layer runs all the same."""
    functions: dict[tuple[str, str, int], str] = {}
    for region in regions:
        if region.wrapped:
            for eqn, _ in walk(next(inner_jaxprs(region.equation))):
                if (function := _layer_function(frames(eqn))) is not None:
                    functions.setdefault(function, region.name)
    found: dict[tuple[str, str], None] = {}
    for eqn, stack in walk(jaxpr):
        if eqn.primitive.name not in MATMULS | COSTLY or "transpose(" in stack:
            continue
        at = frames(eqn)
        if any(f.file_name == _TRACE for f in at):
            continue
        for i, f in enumerate(at):
            if (
                name := functions.get((f.file_name, f.function_name, f.function_start_line))
            ) is None:
                continue
            outer = (
                o for o in at[i + 1 :] if not _in(o, _JAX) and "site-packages" not in o.file_name
            )
            caller = next(outer, f)
            found[name, f"{caller.file_name}:{caller.line_num}"] = None
            break
    return list(found)


def _layer_function(frames: Any) -> tuple[str, str, int] | None:
    """The first of the user's functions that the wrapper called."""
    inner = None
    for f in frames:  # innermost first
        if f.file_name == _TRACE:
            return inner
        if not _in(f, _JAX) and "site-packages" not in f.file_name and not _in(f, _HERE):
            inner = f.file_name, f.function_name, f.function_start_line
    return None
