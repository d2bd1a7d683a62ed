"""`lint`: why a checkpoint saves less memory than it should, read off the traced program."""

import dataclasses
import difflib
import fnmatch
import html
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from ._host import on_host
from ._memory import format_bytes
from ._origin import find_origin, nbytes, short
from ._policies import LAYER_INPUT, TENSOR_NAMES, Policy
from ._regions import (
    find_regions,
    flat_program,
    inner_jaxprs,
    is_checkpoint,
    is_layer,
    is_ours,
    users_line,
)
from ._residuals import readers_of, trace_both


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that makes a program keep more than it should.

    **Attributes:**

    - `check`: `"name without tensor"`, `"kept but unread"`, `"hidden name"`, `"keeps everything"`,
      `"closed over"` or `"promoted"`.
    - `message`: what it is and what to do.
    - `source`: the user's line, where one is known.
    """

    check: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.message}" + (f"\n    {self.source}" if self.source else "")


@dataclasses.dataclass(frozen=True)
class Findings:
    """What `lint` found: print it, `.to_json()` it; `ok` if there is nothing."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) if self.findings else "nothing found"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """A JSON list of findings."""
        return json.dumps([dataclasses.asdict(f) for f in self.findings])


def lint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Findings:
    """Looks for reasons why `jax.checkpoint` does not reduce the memory of `fn`.

    | finding | what it means |
    |---|---|
    | name without tensor | a policy names a tensor that nobody tagged: it does nothing |
    | kept but unread | a residual that the backward pass does not read |
    | hidden name | a tag inside a `custom_vjp`, which policies do not see (jax#40309) |
    | keeps everything | under this policy nothing is recomputed |
    | closed over | an array in a closure becomes a constant of the program and is kept |
    | promoted | a layer takes bfloat16 and gives float32, or a widened copy is kept |

    Nothing is compiled, and nothing need be wrapped.

    **Arguments:**

    - `fn`: the function that you differentiate, for example a loss: not its gradient.
    - `args`, `kwargs`: arrays or `jax.ShapeDtypeStruct`s in any pytrees; the rest is static.

    **Returns:**

    A `Findings`.

    **Raises:** `ValueError` as [`remat_scan.residuals`][] does.
    """
    program, _, avals, _ = flat_program(fn, args, kwargs)
    primal = jax.make_jaxpr(program)(*avals)
    closed, kept, results = trace_both(fn, args, kwargs)
    found = [
        *_names(primal.jaxpr, closed.jaxpr),
        *_hidden(primal.jaxpr),
        *_keeps_everything(closed),
        *_kept(closed.jaxpr, kept, results),
        *_promoted(primal.jaxpr),
    ]
    return Findings(tuple(dict.fromkeys(found)))


def _everything(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _everything(inner)


def _tags(jaxpr: Any) -> dict[str, str]:
    return {
        e.params["name"]: users_line(e) for e in _everything(jaxpr) if e.primitive.name == "name"
    }


def _names(primal: Any, both: Any) -> Iterator[Finding]:
    """Policies are asked about what is in the function that they are given to."""
    tagged = {**_tags(both), **_tags(primal)}
    carried: dict[Any, tuple[set[str], str]] = {}
    for jaxpr in (primal, both):
        for eqn, line in _with_lines(jaxpr):
            if is_checkpoint(eqn) and callable(policy := eqn.params["policy"]):
                mine, _ = carried.setdefault(policy, (set(), line))
                mine |= set(_tags(eqn.params["jaxpr"])) if jaxpr is primal else set(tagged)
    for policy, (mine, line) in carried.items():
        names = [n for n in _names_in(policy) if n != LAYER_INPUT]
        missing = [n for n in names if not any(fnmatch.fnmatchcase(m, n) for m in mine)]
        known = f"tagged here: {', '.join(sorted(mine))}" if mine else "nothing here is tagged"
        # The shipped policies know the names of many kinds of layers; one is enough.
        if names and len(missing) == len(names):
            missing = [", ".join(names)]
        else:
            missing = [n for n in missing if n not in TENSOR_NAMES]
        for name in missing:
            near = difflib.get_close_matches(name, tagged, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield Finding("name without tensor", f"the policy names {name!r}{hint} ({known})", line)


def _names_in(policy: Any, depth: int = 0) -> list[str]:
    """The names that a policy keeps, from what its function closes over."""
    names: list[str] = []
    for cell in getattr(policy, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, Policy):
            return [*value.save, *value.offload]
        if isinstance(value, set | frozenset | list | tuple):
            names += [n for n in value if isinstance(n, str)]
            nested = [v for v in value if callable(v)]
        else:
            nested = [value] if callable(value) else []
        for inner in nested if depth < 3 else ():
            names += _names_in(inner, depth + 1)
    return names


def _with_lines(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """All equations with the user's line, or that of the call that they are in."""
    for eqn in jaxpr.eqns:
        line = users_line(eqn) or outer
        yield eqn, line
        for inner in inner_jaxprs(eqn):
            yield from _with_lines(inner, line)


def _hidden(jaxpr: Any, inside: bool = False) -> Iterator[Finding]:
    for eqn in jaxpr.eqns:
        if inside and eqn.primitive.name == "name":
            name = eqn.params["name"]
            message = (
                f"{name!r} is tagged inside a custom_vjp, where policies do not see it: tag its "
                "arguments or results outside, or the residuals in its forward rule"
            )
            yield Finding("hidden name", message, users_line(eqn))
        custom = eqn.primitive.name.startswith("custom_vjp") and not is_ours(eqn)
        for inner in inner_jaxprs(eqn):
            yield from _hidden(inner, inside or custom)


def _keeps_everything(closed: Any) -> Iterator[Finding]:
    _, regions, _ = find_regions(closed)
    for region in regions:
        if region.phase != "backward" or region.checkpoint != "inside":
            continue
        if region.matmuls and region.again == region.costly_again == 0:
            equation = next(
                (
                    e
                    for i in inner_jaxprs(region.equation)
                    for e in _everything(i)
                    if is_checkpoint(e)
                ),
                region.equation,
            )
            policy = equation.params.get("policy")
            name = getattr(policy, "__qualname__", policy)
            message = (
                f"{region.name}: under the policy {name} nothing that costs anything is recomputed: "
                "this checkpoint keeps all that the backward pass reads"
            )
            yield Finding("keeps everything", message, region.source)


def _kept(jaxpr: Any, kept: list[Any], results: list[Any]) -> Iterator[Finding]:
    readers, _ = readers_of(jaxpr, {}, {v for v in results if isinstance(v, jex.Var)})
    closed_over: dict[Any, Any] = {}
    # An offloading layer hands its input on beside the copy in the host's memory: compilers drop it.
    offloads = any(on_host(v.aval) for v in kept)
    for var in kept:
        origin = find_origin(jaxpr, var)
        size, shape = nbytes(var.aval), short(var.aval)
        if not size:
            continue
        if origin.kind == "constant" and var.aval.ndim:
            closed_over.setdefault(origin.key, (size, shape, origin.source))
        if origin.kind != "made":
            continue
        if var not in readers and not (offloads and origin.layer is not None):
            message = (
                f"{shape} ({format_bytes(size)}) is kept, but the backward pass does not read it"
            )
            yield Finding("kept but unread", message, origin.source)
        made = origin.made_by
        if made is not None and made.primitive.name == "convert_element_type":
            before = made.invars[0].aval.dtype
            if _wider(made.outvars[0].aval.dtype, before):
                message = (
                    f"{shape} ({format_bytes(size)}) is kept although it is {before.name} made wider: "
                    "keep the narrow one and widen it where it is used"
                )
                yield Finding("promoted", message, origin.source)
    for size, shape, source in closed_over.values():
        message = (
            f"{shape} ({format_bytes(size)}) is closed over: a constant of the program, in memory "
            "through the whole step; give it as an argument, or make it inside the layer"
        )
        yield Finding("closed over", message, source)


def _promoted(jaxpr: Any) -> Iterator[Finding]:
    for eqn in _everything(jaxpr):
        if not (is_layer(eqn) or is_checkpoint(eqn)):
            continue
        floats = [v.aval for v in eqn.invars if _is_float(v.aval)]
        for out in (v.aval for v in eqn.outvars if _is_float(v.aval) and v.aval.ndim):
            same = [a for a in floats if a.shape == out.shape]
            if same and all(_wider(out.dtype, a.dtype) for a in same):
                message = (
                    f"a layer takes {short(same[0])} and gives {short(out)}: every later layer is "
                    "wider; cast its result back, or what made it wider"
                )
                yield Finding("promoted", message, _widening(eqn) or users_line(eqn))


def _widening(eqn: Any) -> str:
    """The last line in a layer that makes a matrix product's or a sum's operand wider."""
    lines = [
        users_line(e)
        for inner in inner_jaxprs(eqn)
        for e in _everything(inner)
        if e.primitive.name == "convert_element_type"
        and _wider(e.outvars[0].aval.dtype, e.invars[0].aval.dtype)
    ]
    return lines[-1] if lines else ""


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.floating)


def _wider(a: Any, b: Any) -> bool:
    floating = jnp.issubdtype(a, jnp.floating) and jnp.issubdtype(b, jnp.floating)
    return bool(floating) and a.itemsize > b.itemsize
