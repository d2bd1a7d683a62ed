"""FLOPs of a traced program, with loop trip counts."""

import math
from typing import Any


def count_flops(jaxpr: Any) -> tuple[int, bool]:
    """Floating-point operations of the matrix products and convolutions of a traced program.

    A multiply-add counts as two. A `scan` counts as its length times its body, a `cond` as its most
    expensive branch, a `shard_map` as its body times its shards: the figure is for all devices
    together. Element-wise operations are left out, as is usual. XLA's own `cost_analysis` counts the
    body of a loop once on TPU and is not there at all for a GPU that is not there.

    **Arguments:**

    - `jaxpr`: a `jax.extend.core.ClosedJaxpr` or `Jaxpr`.

    **Returns:**

    The FLOPs, and whether that is exact: `False` if there is a `while` whose trip count is not
    known (its body counts once) or a custom kernel that gives no estimate.
    """
    total, exact = 0, True
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        flops, known = _count(eqn)
        total += flops
        exact = exact and known
    return total, exact


def _count(eqn: Any) -> tuple[int, bool]:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(
            lhs[d] for d in contracted
        ), True
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        macs = math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(out_features, 1)
        return 2 * macs, True
    if name == "pallas_call":
        estimate = params.get("cost_estimate")
        return (int(estimate.flops), True) if estimate is not None else (0, False)
    inner = [count_flops(j) for value in params.values() for j in _jaxprs(value)]
    if not inner:
        return 0, True
    exact = all(known for _, known in inner)
    if name == "cond":
        return max(flops for flops, _ in inner), exact
    if name.startswith("custom_vjp_call"):
        inner = inner[:1]  # the forward function; the rules have been applied where they matter
    total = sum(flops for flops, _ in inner)
    if name == "scan":
        return total * params["length"], exact
    if name == "while":
        return total, exact and total == 0
    if name == "shard_map":
        mesh, manual = params["mesh"], params.get("manual_axes")
        shards = math.prod(mesh.shape[a] for a in (manual or mesh.axis_names))
        return total * shards, exact
    return total, exact


def _jaxprs(value: Any) -> list[Any]:
    """The programs inside one parameter of an equation; parameters of any other kind have none."""
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
        return [value]
    if isinstance(value, tuple | list):
        return [j for v in value for j in _jaxprs(v)]
    return []
