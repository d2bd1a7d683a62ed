"""`residuals`: what a program keeps between its forward and its backward pass, before any compiler."""

import dataclasses
import html
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from ._host import on_host
from ._memory import GIB, format_bytes
from ._origin import body, find_origin, nbytes, short
from ._regions import (
    MATMULS,
    find_regions,
    flat_program,
    inner_jaxprs,
    is_layer,
    paired,
    users_line,
    walk,
)

OUTSIDE = "outside layers"
INPUT = "(input)"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor that the backward pass needs.

    **Attributes:**

    - `layer`: the number and name of the layer whose backward pass reads it.
    - `name`: its checkpoint name, `"(input)"` for what a layer was given, or what made it.
    - `what`: `"saved"` on the device, `"offloaded"` to the host, `"recomputed"`, or `"argument"`:
      kept, but alive anyway, because it was given to the program or is a constant of it.
    - `bytes`, `shape`, `source`: its size (of all devices together), its type, the user's line.
    """

    layer: str
    name: str
    what: str
    bytes: int
    shape: str
    source: str


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What `residuals` found: print it for a table, `.plot()` it, `.to_json()` it.

    **Attributes:**

    - `tensors`: everything kept or recomputed.
    - `alive`: bytes alive at each step of the traced program, forward and then backward, without
      its arguments; `kept`: the part that the forward pass left for the backward pass;
      `turn`: the step at which the backward pass begins.
    """

    tensors: tuple[Tensor, ...]
    alive: tuple[int, ...]
    kept: tuple[int, ...]
    turn: int

    def total(self, what: str, *, layer: str | None = None, name: str | None = None) -> int:
        """Bytes that are `"saved"`, `"offloaded"`, `"recomputed"` or `"argument"`."""
        return sum(
            t.bytes
            for t in self.tensors
            if t.what == what and layer in (None, t.layer) and name in (None, t.name)
        )

    def __str__(self) -> str:
        whats = ("saved", "offloaded", "recomputed", "argument")
        lines = [f"{'':<44}" + "".join(f"{w:>13}" for w in whats)]

        def row(title: str, **only: str) -> str:
            cells = (f"{format_bytes(self.total(w, **only)):>13}" for w in whats)
            return f"{title:<44}" + "".join(cells)

        for layer in dict.fromkeys(t.layer for t in self.tensors):
            lines.append(row(layer, layer=layer))
            mine = [t for t in self.tensors if t.layer == layer and t.what != "argument"]
            for name in dict.fromkeys(t.name for t in sorted(mine, key=lambda t: -t.bytes)):
                shape = next(t for t in mine if t.name == name).shape
                lines.append(row(f"  {name} {shape}", layer=layer, name=name))
        lines.append(row("all"))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def plot(self, ax: Any = None) -> Any:
        """What is alive at each step of the traced program, in GiB, on matplotlib axes.

        **Raises:** `ImportError` if matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(figsize=(7, 3))
        steps = range(len(self.alive))
        ax.fill_between(steps, [b / GIB for b in self.alive], step="mid", alpha=0.3, label="alive")
        ax.fill_between(steps, [b / GIB for b in self.kept], step="mid", label="kept for backward")
        ax.axvline(self.turn - 0.5, linestyle=":", color="black")
        ax.set_xlabel("step of the traced program: forward | backward")
        ax.set_ylabel("GiB, all devices")
        ax.legend()
        return ax


def residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """What the backward pass of `fn` keeps from the forward pass, and what it computes again.

    ```python
    print(residuals(loss, weights, batch))
    ```

    Nothing is compiled: this is what JAX asks for. What the compiler makes of it is in
    [`remat_scan.memory_report`][], and whether it obeys, in [`remat_scan.verify`][]. `fn` needs no
    wrapped layer; what `jax.checkpoint` and `lax.scan` keep is shown the same way.

    **Arguments:**

    - `fn`: the function that you differentiate, for example a loss: not its gradient.
    - `args`, `kwargs`: arrays or `jax.ShapeDtypeStruct`s in any pytrees; the rest is static.

    **Returns:**

    A `Residuals`, in bytes of all devices together.

    **Raises:** `ValueError` if nothing in `fn` can be differentiated, or if it is a gradient.
    """
    closed, kept, results = trace_both(fn, args, kwargs)
    jaxpr = closed.jaxpr
    _, regions, _ = find_regions(closed)
    titles: dict[int, str] = {}
    for i, passes in enumerate(paired(regions)):
        for region in passes:
            titles.setdefault(id(region.equation), f"{i} {passes[0].name}")
    readers, _ = readers_of(jaxpr, titles, {v for v in results if isinstance(v, jex.Var)})
    tensors: list[Tensor] = []
    seen: set[Any] = set()
    saved: set[Any] = set()
    views: set[Any] = set()  # of other tensors: no bytes of their own
    for var in kept:
        origin = find_origin(jaxpr, var)
        if origin.kind != "made" or origin.key in seen:
            views.add(var)
        if origin.key in seen or not nbytes(var.aval) or var not in readers:
            continue  # the same bytes again, or nobody reads them: compilers drop those
        seen.add(origin.key)
        layer = readers[var]
        mine = origin.kept_on_purpose or titles.get(origin.layer or 0) == layer
        name = origin.name or (
            f"({origin.made_by.primitive.name})"
            if origin.made_by is not None and (mine or layer == OUTSIDE)
            else INPUT
        )
        if origin.kind == "made":
            saved.add(var)
        what = (
            "offloaded" if on_host(var.aval) else "saved" if origin.kind == "made" else "argument"
        )
        tensors.append(Tensor(layer, name, what, nbytes(var.aval), short(var.aval), origin.source))
    tensors += _recomputed(jaxpr, titles)
    order = {t: i for i, t in enumerate(dict.fromkeys(titles.values()))}
    tensors.sort(key=lambda t: order.get(t.layer, len(order)))
    alive, kept_at, turn = _timeline(jaxpr, saved, views, results)
    return Residuals(tuple(tensors), tuple(alive), tuple(kept_at), turn)


def trace_both(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], list[Any]]:
    """Forward and backward pass as one program; the variables kept in between; its results."""
    program, _, avals, _ = flat_program(fn, args, kwargs)
    is_float = [jnp.issubdtype(a.dtype, jnp.inexact) for a in avals]
    if not any(is_float):
        raise ValueError(
            "residuals: no argument has a floating-point type: nothing to differentiate."
        )

    def both(*arrays: Any) -> Any:
        def of_floats(*floats: Any) -> list[Any]:
            rest = iter(floats)
            out = program(*(next(rest) if f else x for x, f in zip(arrays, is_float, strict=True)))
            return [x for x in out if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

        outputs, vjp = jax.vjp(of_floats, *(x for x, f in zip(arrays, is_float, strict=True) if f))
        if not outputs:
            raise ValueError("residuals: no result has a floating-point type.")
        gradients = vjp([jnp.ones_like(y) for y in outputs])
        return outputs, jax.tree.leaves(vjp), gradients

    closed, shape = jax.make_jaxpr(both, return_shape=True)(*avals)
    if any("transpose(" in stack for _, stack in walk(jax.make_jaxpr(program)(*avals).jaxpr)):
        raise ValueError(
            "residuals: this function differentiates already; give the function that it "
            "differentiates (the loss, not its gradient or the training step)."
        )
    count, many = len(shape[0]), len(shape[1])
    out = closed.jaxpr.outvars
    kept = [v for v in out[count : count + many] if isinstance(v, jex.Var)]
    return closed, list(dict.fromkeys(kept)), [*out[:count], *out[count + many :]]


# -- Who reads it ----------------------------------------------------------------------------------


def readers_of(
    jaxpr: Any, titles: dict[int, str], wanted: set[Any], outer: str = ""
) -> tuple[dict[Any, str], set[Any]]:
    """What the backward pass reads for the results that are wanted, and in which layer first; and
    all that is read for them."""
    found: dict[Any, str] = {}
    needed = set(wanted)
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(v in needed for v in eqn.outvars):
            continue
        stack = f"{outer}/{eqn.source_info.name_stack}"
        backward = "transpose(" in stack
        title = titles.get(id(eqn), OUTSIDE)
        layers, read = {}, set()
        if (inner := body(eqn)) is not None:
            each = eqn.primitive.name == "scan" and eqn.params["length"] > 1
            goal = {v for v, o in zip(inner.outvars, eqn.outvars, strict=True)
                    if isinstance(v, jex.Var) and (each or o in needed)}  # fmt: skip
            layers, read = readers_of(inner, titles, goal, stack)
        for i, operand in enumerate(eqn.invars):
            if isinstance(operand, jex.Var) and (inner is None or inner.invars[i] in read):
                needed.add(operand)
                if backward:
                    layer = title
                    if inner is not None and layer == OUTSIDE:
                        layer = layers.get(inner.invars[i], OUTSIDE)
                    if layer != OUTSIDE or operand not in found:
                        found[operand] = layer
    return found, needed


def _recomputed(jaxpr: Any, titles: dict[int, str], steps: int = 1) -> Iterator[Tensor]:
    """Named tensors, and matrix products without a name, that backward passes compute again."""
    for eqn in jaxpr.eqns:
        times = steps * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in inner_jaxprs(eqn):
            if id(eqn) in titles:
                yield from _again(inner, titles[id(eqn)], times)
            else:
                yield from _recomputed(inner, titles, times)


def _again(jaxpr: Any, layer: str, steps: int, outer: str = "") -> Iterator[Tensor]:
    reads = {v: e for e in jaxpr.eqns if e.primitive.name == "name" for v in e.invars
             if isinstance(v, jex.Var)}  # fmt: skip
    for eqn in jaxpr.eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        times = steps * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        is_name = eqn.primitive.name == "name"
        if "rematted_computation" in stack and (
            is_name or (eqn.primitive.name in MATMULS and eqn.outvars[0] not in reads)
        ):
            aval = eqn.outvars[0].aval
            name = eqn.params["name"] if is_name else f"({eqn.primitive.name})"
            yield Tensor(
                layer, name, "recomputed", steps * nbytes(aval), short(aval), users_line(eqn)
            )
        if not is_layer(eqn):
            for inner in inner_jaxprs(eqn):
                yield from _again(inner, layer, times, stack)


# -- What is alive when ------------------------------------------------------------------------------


def _timeline(
    jaxpr: Any, kept: set[Any], views: set[Any], results: list[Any]
) -> tuple[list[int], list[int], int]:
    steps = list(_flattened(jaxpr, {}))
    last: dict[Any, int] = {}
    for i, (_, reads, writes, _) in enumerate(steps):
        last.update(dict.fromkeys((*writes, *reads), i))
    last.update({v: len(steps) for v in results if isinstance(v, jex.Var)})
    ends = Counter[int]()
    kept_ends = Counter[int]()
    alive, kept_at = [], []
    now = kept_now = 0
    for i, (eqn, _, writes, _) in enumerate(steps):
        for v in writes:
            size = 0 if on_host(v.aval) or v in views else nbytes(v.aval)
            now += size
            ends[last[v]] += size
            if v in kept:
                kept_now += size
                kept_ends[last[v]] += size
        alive.append(now + _working_set(eqn))
        kept_at.append(kept_now)
        now -= ends[i]
        kept_now -= kept_ends[i]
    turn = next((i for i, s in enumerate(steps) if s[3]), len(steps))
    return alive, kept_at, turn


def _flattened(
    jaxpr: Any, names: dict[Any, Any], backward: bool = False
) -> Iterator[tuple[Any, list[Any], list[Any], bool]]:
    """Equations with what they read and write; calls that are no layers are opened."""
    for eqn in jaxpr.eqns:
        late = backward or "transpose(" in str(eqn.source_info.name_stack)
        reads = [names.get(v, v) for v in eqn.invars if isinstance(v, jex.Var)]
        inner = body(eqn) if eqn.primitive.name in ("jit", "pjit") and not is_layer(eqn) else None
        if inner is None:
            yield eqn, reads, [v for v in eqn.outvars if not isinstance(v, jex.DropVar)], late
            continue
        inside = {
            v: names.get(o, o) for v, o in zip(inner.invars, eqn.invars, strict=True)
            if isinstance(o, jex.Var)
        }  # fmt: skip
        inside |= {v: o for v, o in zip(inner.outvars, eqn.outvars, strict=True)
                   if isinstance(v, jex.Var) and v not in inside}  # fmt: skip
        yield from (
            (e, r, [inside.get(v, v) for v in w], b)
            for e, r, w, b in _flattened(inner, inside, late)
        )


def _working_set(eqn: Any) -> int:
    """The most that is alive inside an equation, beside its operands and results."""
    return max((_peak(inner) for inner in inner_jaxprs(eqn)), default=0)


def _peak(jaxpr: Any) -> int:
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update({v: i for v in eqn.invars if isinstance(v, jex.Var)})
    results = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    given = {*jaxpr.invars, *jaxpr.constvars}
    now = best = 0
    ends = Counter[int]()
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if v not in results and v not in given:
                now += nbytes(v.aval)
                ends[last.get(v, i)] += nbytes(v.aval)
        best = max(best, now + _working_set(eqn))
        now -= ends[i]
    return best
