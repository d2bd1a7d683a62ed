"""Following a kept tensor of a traced program back to what made it."""

import dataclasses
from typing import Any

import jax
import jax.extend.core as jex

from ._host import on_host
from ._regions import inner_jaxprs, is_layer, users_line

# The same bytes under another shape, or under another name.
_VIEWS = frozenset(
    {"name", "reduce_precision", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy",
     "copy_p", "sharding_constraint", "device_put", "pvary"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    **Attributes:**

    - `key`: equal for values that are the same bytes.
    - `kind`: `"made"` by the program, `"argument"` or `"constant"`.
    - `name`: its checkpoint name, if any; `made_by`: the equation that made it, if one did.
    - `kept_on_purpose`: whether a policy of `jax.checkpoint` keeps it.
    - `layer`: the identity of the outermost layer's equation that made it.
    """

    key: Any
    kind: str
    name: str
    made_by: Any
    kept_on_purpose: bool
    layer: int | None
    source: str


def find_origin(jaxpr: Any, var: Any) -> Origin:
    """Follows a value back through views, names, calls and loops to what made it."""
    path: list[tuple[Any, Any]] = [(jaxpr, None)]
    name, made_by, on_purpose, source = "", None, False, ""
    copy: Any = None  # the value is a copy of what it comes from, with bytes of its own
    while True:
        scope, caller = path[-1]
        made = next((e for e in scope.eqns if var in e.outvars), None)
        if made is None:
            if caller is None or var not in scope.invars:
                kind = "argument" if caller is None and var in scope.invars else "constant"
                break
            at = scope.invars.index(var)
            var = caller.invars[at]
            path.pop()
            source = source or users_line(caller)
            stacks = caller.primitive.name == "scan" and caller.params["length"] > 1
            if stacks and scope.invars[at].aval.shape == getattr(var.aval, "shape", None):
                kind = "made"  # the carry of each step
                break
        elif made.primitive.name == "optimization_barrier":
            var = made.invars[made.outvars.index(var)]
        elif _is_view(made, var):
            if made.primitive.name == "name":
                name, source = name or made.params["name"], source or users_line(made)
            on_purpose = on_purpose or made.primitive.name == "reduce_precision"
            if made.primitive.name == "device_put" and on_host(var.aval):
                copy, source = (_places(path), var), source or users_line(made)
            var = made.invars[0]
        elif (inner := body(made)) is not None:
            at = made.outvars.index(var)
            if made.primitive.name == "scan" and made.params["length"] > 1:
                copy = copy or (_places(path), var)
            path.append((inner, made))
            var = inner.outvars[at]
        else:
            kind, made_by, source = "made", made, source or users_line(made)
            break
        if isinstance(var, jex.Literal):
            return Origin(copy or id(var), "constant", name, None, on_purpose, None, source)
    key = copy or (_places(path), var)
    if copy is not None and kind == "argument" and any(e is not None for _, e in path[1:]):
        kind = "made"
    layer = next((id(e) for _, e in path if e is not None and is_layer(e)), None)
    return Origin(key, kind, name, made_by, on_purpose, layer, source)


def _places(path: list[tuple[Any, Any]]) -> tuple[int, ...]:
    return tuple(id(e) for _, e in path)


def _is_view(eqn: Any, var: Any) -> bool:
    if eqn.primitive.name not in _VIEWS or not isinstance(eqn.invars[0], jex.Var | jex.Literal):
        return False
    return nbytes(eqn.invars[0].aval) == nbytes(var.aval)


def body(eqn: Any) -> Any:
    """The one program inside an equation that takes its operands and gives its results."""
    if eqn.primitive.name in ("while", "cond"):
        return None
    inner = next(inner_jaxprs(eqn), None)
    if inner is None or len(inner.outvars) != len(eqn.outvars):
        return None
    return inner if len(inner.invars) == len(eqn.invars) else None


def nbytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    return aval.size * dtype.itemsize


def short(aval: Any) -> str:
    return aval.str_short() if hasattr(aval, "str_short") else str(aval)
