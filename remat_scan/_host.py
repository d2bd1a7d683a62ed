"""What a traced program puts into the host's memory, before any compiler changes its mind."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex


def on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def bytes_sent_to_host(jaxpr: Any) -> int:
    """Bytes that are in the host's memory at once, at least, because the program copies them there.

    Of a checkpointed region only what its own pass sends counts, and of several such regions the
    largest: what one sends is gone when the next one runs. A loop counts what leaves it, with all
    iterations, or what one iteration sends. What nobody reads is not sent.

    **Arguments:**

    - `jaxpr`: a `jax.extend.core.ClosedJaxpr` or `Jaxpr`; a `shard_map` counts as all of its shards.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return _sent(jaxpr, [True] * len(jaxpr.outvars))


def _sent(jaxpr: Any, results_read: Sequence[bool]) -> int:
    read = {v for v, r in zip(jaxpr.outvars, results_read, strict=True) if r and _is_var(v)}
    sent = in_a_region = 0
    for eqn in reversed(jaxpr.eqns):
        outs_read = [v in read for v in eqn.outvars]
        if not any(outs_read) and not eqn.effects:
            continue
        name, params = eqn.primitive.name, eqn.params
        pairs = list(zip(eqn.invars, eqn.outvars, outs_read, strict=False))
        if name in ("device_put", "optimization_barrier"):  # result by result
            read.update(v for v, _, r in pairs if r and _is_var(v))
        else:
            read.update(filter(_is_var, eqn.invars))
        if name == "device_put":
            sent += _bytes(out for given, out, r in pairs if r and not on_host(given.aval))
            continue
        inner = []
        for j in jex.jaxprs_in_params(params):
            same = len(j.outvars) == len(outs_read)
            inner.append(_sent(j, outs_read if same else [True] * len(j.outvars)))
        if not any(inner):
            continue
        if name.startswith(("remat", "checkpoint")):
            in_a_region = max(in_a_region, sum(inner))
        elif name == "cond":
            sent += max(inner)
        elif name == "scan":
            sent += max(_bytes(eqn.outvars), sum(inner))
        elif name == "shard_map":
            mesh, manual = params["mesh"], params.get("manual_axes")
            shards = math.prod(mesh.shape[a] for a in (manual or mesh.axis_names))
            sent += sum(inner) * shards
        else:
            sent += sum(inner)
    return sent + in_a_region


def _is_var(v: Any) -> bool:
    return not isinstance(v, jex.Literal)


def _bytes(variables: Iterable[Any]) -> int:
    avals = [v.aval for v in variables if on_host(v.aval)]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
