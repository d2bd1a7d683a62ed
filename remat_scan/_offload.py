"""Checkpointing with residuals in the host's memory, inside a boundary that keeps the copies apart.

Left to itself, XLA starts the copies to the host late and the copies back early, so that offloading
costs device memory instead of saving it; and a residual that leaves a loop as one of its stacked
results can't be in host memory on TPU at all. So the layer's differentiation is written out:

```python
def forward(operands):
    outputs, residuals = isolated(layer_and_what_the_policy_keeps)(operands)
    on_host = copy_to_host(residuals)
    return barrier(outputs, on_host)  # the next layer starts when the copies have ended

def backward(operands, on_host, cotangents):
    def body(operands, on_host, cotangents):  # runs in the loop, or behind the barrier
        return vjp_of_layer(operands, copy_back(on_host))(cotangents)
    return isolated(body)(operands, on_host, cotangents)
```

The price is forward-mode differentiation, which `jax.custom_vjp` does not have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from ._isolation import Flat, isolate
from ._policies import Policy

_HOST = jax.memory.Space.Host
_DEVICE = jax.memory.Space.Device


def offloading_layer(fn: Flat, num_weights: int, policy: Policy, isolation: str) -> Flat:
    """`fn`, a flat function of operands, checkpointed with residuals on the host and isolated.

    **Arguments:**

    - `num_weights`: the operands from here on are a call's arguments, the ones before are weights.
    """
    # Inside the boundary the policy saves what it offloads; the copies are made around it.
    inside = dataclasses.replace(
        policy,
        save=(*policy.save, *policy.offload),
        offload=(),
        unnamed=policy.unnamed.removeprefix("offload_"),
    )
    checkpointed = jax.checkpoint(fn, policy=inside.as_function())

    @jax.custom_vjp
    def layer(*operands: Any) -> list[Any]:
        run, in_types, out_types = _flat_program(fn, operands)
        return list(isolate(run, in_types, out_types, num_weights, isolation)(*operands))

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        split = _Residuals(checkpointed, operands, policy)
        run, in_types, out_types = _flat_program(split.forward, operands)
        results = isolate(run, in_types, out_types, num_weights, isolation)(*operands)
        outputs, kept, to_host = split.sort(results)
        on_host = [jax.device_put(x, _HOST) for x in to_host]
        outputs, on_host = jax.lax.optimization_barrier((outputs, on_host))
        return outputs, (split, list(operands), kept, on_host)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        split, operands, kept, on_host = residuals
        is_float0 = [_is_float0(ct) for ct in cotangents]
        weights = [*operands, *kept, *on_host]

        def body(*flat: Any) -> list[Any]:
            rest = iter(flat)
            operands_, kept_, on_host_ = (
                [next(rest) for _ in p] for p in (operands, kept, on_host)
            )
            cts = [ct if f else next(rest) for ct, f in zip(cotangents, is_float0, strict=True)]
            from_host = [jax.device_put(x, _DEVICE) for x in on_host_]
            gradients = split.vjp(operands_, kept_, from_host)(cts)
            return [g for g in gradients if not _is_float0(g)]

        flat = [*weights, *(ct for ct, f in zip(cotangents, is_float0, strict=True) if not f)]
        run, in_types, out_types = _flat_program(body, flat)
        gradients = isolate(run, in_types, out_types, len(weights), isolation)(*flat)
        if isolation in ("barrier", "both"):
            gradients = jax.lax.optimization_barrier(list(gradients))
        rest = iter(gradients)
        return tuple(next(rest) if _has_cotangent(x) else None for x in operands)

    layer.defvjp(forward, backward)
    return layer


@jax.tree_util.register_static
class _Residuals:
    """What `jax.vjp` keeps of a checkpointed layer, and where each residual belongs.

    A residual is one of the operands, or it is kept on the device, or it goes to the host.
    """

    def __init__(self, checkpointed: Flat, operands: Sequence[Any], policy: Policy) -> None:
        def both(*operands: Any) -> tuple[list[Any], list[Any]]:
            outputs, vjp = jax.vjp(checkpointed, *operands)
            residuals, self._treedef = jax.tree.flatten(vjp)
            return list(outputs), residuals

        self._treedef: Any = None  # known when `both` has been traced
        closed, (outputs, _residuals) = jax.make_jaxpr(both, return_shape=True)(*operands)
        jaxpr = closed.jaxpr
        self._num_outputs = len(outputs)
        made: dict[Any, tuple[str, int]] = {v: ("operand", i) for i, v in enumerate(jaxpr.invars)}
        count = {"kept": 0, "host": 0}
        self._source: list[tuple[str, int]] = []
        self._exported: list[int] = []
        for o, var in enumerate(jaxpr.outvars[self._num_outputs :], start=self._num_outputs):
            if isinstance(var, jax.extend.core.Literal) or var not in made:
                where = "host" if _goes_to_host(jaxpr, var, policy) else "kept"
                source = (where, count[where])
                count[where] += 1
                self._exported.append(o)
                if not isinstance(var, jax.extend.core.Literal):
                    made[var] = source
            else:
                source = made[var]
            self._source.append(source)
        self._where = [where for where, _ in dict.fromkeys(self._source) if where != "operand"]
        self._evaluate = lambda *ops: jax.core.eval_jaxpr(jaxpr, closed.consts, *ops)

    def forward(self, *operands: Any) -> list[Any]:
        """Outputs, then the residuals that are no operands."""
        results = self._evaluate(*operands)
        return [*results[: self._num_outputs], *(results[o] for o in self._exported)]

    def sort(self, results: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What `forward` returned, as outputs, residuals to keep, and residuals for the host."""
        exported = list(zip(self._where, results[self._num_outputs :], strict=True))
        kept = [x for where, x in exported if where == "kept"]
        to_host = [x for where, x in exported if where == "host"]
        return list(results[: self._num_outputs]), kept, to_host

    def vjp(
        self, operands: Sequence[Any], kept: Sequence[Any], from_host: Sequence[Any]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """The layer's vjp function, put together again."""
        found = {"operand": operands, "kept": kept, "host": from_host}
        residuals = [found[where][i] for where, i in self._source]
        return jax.tree.unflatten(self._treedef, residuals)


def _goes_to_host(jaxpr: Any, var: Any, policy: Policy) -> bool:
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqn = made_by.get(var)
    if eqn is None:
        return False
    if eqn.primitive.name == "name":
        return policy.action(eqn.params["name"]) == "offload"
    if eqn.primitive.name == "reduce_precision":  # jax.checkpoint puts it on what it saves
        return _goes_to_host(jaxpr, eqn.invars[0], policy)
    if (tag := getattr(eqn.params.get("_prim"), "name", None)) is not None:  # under jax_remat3
        return policy.action(tag) == "offload"
    index = eqn.outvars.index(var)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):  # of `jit`, loops, all branches
        if len(inner.outvars) == len(eqn.outvars) and _goes_to_host(
            inner, inner.outvars[index], policy
        ):
            return True
    return (
        policy.unnamed == "offload_dots_with_no_batch_dims" and eqn.primitive.name == "dot_general"
    )


def _flat_program(fn: Flat, operands: Sequence[Any]) -> tuple[Flat, list[Any], list[Any]]:
    closed = jax.make_jaxpr(fn)(*operands)
    return (
        lambda *ops: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *ops),
        [v.aval for v in closed.jaxpr.invars],
        [v.aval for v in closed.jaxpr.outvars],
    )


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _has_cotangent(x: Any) -> bool:
    dtype = jnp.asarray(x).dtype if isinstance(x, np.ndarray | np.generic) else x.dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact))
