"""`run_stack`: a list of unlike layers, with values that cross them, as one call."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import PRNGKeyArray

from ._isolation import check_isolation
from ._nested import Nested
from ._periods import Stacked, unstack_layers
from ._policies import resolve
from ._stack_layer import PerLayer, as_layers, check_order, expand, for_each
from ._stack_run import Run, segment_runner


class StackResult(NamedTuple):
    """What [`remat_scan.run_stack`][] returns.

    - `x`: the stream after the last layer.
    - `values`: by name, the last of each value that a layer wrote, and those that were given.
    - `collected`: by name, what layers collected, by the layer's index.
    """

    x: Any
    values: dict[str, Any]
    collected: dict[str, dict[int, Any]]


def run_stack(
    layers: Sequence[Any],
    x: Any,
    *args: Any,
    per_layer: Any = None,
    values: Mapping[str, Any] | None = None,
    key: PRNGKeyArray | None = None,
    policy: Any = "full",
    isolation: Any = "loop",
    boundary: int = 1,
    overlap: int = 0,
    schedule: Nested | None = None,
) -> StackResult:
    """Runs a list of layers, alike or not, each behind [`remat_scan.checkpointed_layer`][].

    ```python
    def run_stack(layers, x, *args, per_layer, values, key, policy, isolation):
        collected = {}
        for i, layer in enumerate(layers):
            inputs = (x,) if per_layer is None else (x, per_layer[i])
            named = {keyword: values[name] for keyword, name in layer.reads.items()}
            if key is not None:
                named["key"] = jax.random.fold_in(key, i)
            run = checkpointed_layer(layer.fn, policy=policy[i], isolation=isolation[i])
            result = run(*inputs, *args, **named)
            x, *more = result if layer.writes or layer.collects else (result,)
            for name in layer.writes:
                values[name] = more.pop(0)
            for name in layer.collects:
                collected.setdefault(name, {})[i] = more.pop(0)
        return x, values, collected
    ```

    A layer that writes and collects nothing returns `x` alone. Every layer keeps its own parameters,
    their tree and their shardings:

    ```python
    y = run_stack(blocks, x, mask, per_layer=embeddings).x

    stack = [StackLayer(b, collects="loss") if b.is_moe else b for b in blocks]
    y, _, collected = run_stack(stack, x, policy={"MoE": "full", "Dense": "save_qkv_proj"})
    loss = sum(collected["loss"].values())
    ```

    A [`remat_scan.Stacked`][] among the layers stands for all of its repetitions, and runs as one
    `jax.lax.scan` with each layer isolated inside: tracing and compiling no longer grow with depth.
    What is written in one repetition is there in the next, and the last is left after the run. A list
    is made into such a stack by [`remat_scan.stack_layers`][], which says what that costs.

    What a period costs in memory: the gradients of all its repetitions lie in one array from the
    start of the backward pass, where an unrolled stack's come one after another. A period that is one
    boundary needs no isolation inside, since the iteration is the loop. In longer ones `"barrier"`
    acts in the backward pass alone, and keeps nothing more; `"loop"` and `"both"` keep a second copy
    of the run's weights (each device its shard) for the backward pass. Where a layer of such a period
    offloads, it is kept apart as by `"barrier"` whatever is asked: XLA compiles no loop inside the scan
    whose residuals lie on the host.

    **Arguments:**

    - `layers`: callables, [`remat_scan.StackLayer`][]s and [`remat_scan.Stacked`][]s.
    - `x`: the stream, any pytree; layers may change its type, but not within a `Stacked`.
    - `args`: given to every layer after `x` (and after its slice of `per_layer`).
    - `per_layer`: a `list` with an entry for each layer, or another pytree of arrays with a leading
      axis of that length. A list's entries may be unlike, but for the layers at the same place of a
      period, whose entries are stacked (copied).
    - `values`: named values that exist before the first layer.
    - `key`: layers get the keyword `key=`, this key with the layer's index folded in. Periods and
      boundaries change no key.
    - `policy`, `isolation`: as for [`remat_scan.checkpointed_layer`][]: one for all layers, a list with
      one for each, or a mapping from patterns to them. A pattern is a layer's index or a range
      (`3`, `"0-14"`, both ends included), or a name with wildcards as in `fnmatch`. The first pattern
      that matches a layer counts.
    - `boundary`: how many consecutive layers are checkpointed and isolated as one. Only what crosses
      the boundary is kept, and the working set is that of so many layers. They are counted anew from
      the start of each `Stacked`.
    - `overlap`: for `isolation="barrier"`, how many layers (or boundaries) a weight gradient may come
      late, so that its reduction over devices runs beside the backward pass of the layers before. Layer
      `i - 1` then waits for the weight gradients of layer `i + overlap`, and up to so many working sets
      more are alive. Iterations of a `Stacked` never overlap, the layers inside one do.
    - `schedule`: a [`remat_scan.Nested`][], which keeps fewer layer inputs and recomputes more. Every
      run of layers between `Stacked`s, and every `Stacked`, has such a schedule of its own; in a
      `Stacked`, what is nested are its repetitions, as loops in loops. `Nested(states=...)` has no
      regular segments: it takes every `Stacked` apart and is one schedule for all layers, and compile
      time then grows with depth. A layer's policy holds within its segment, which itself keeps its
      inputs only: what crosses it. It is isolated as its first layer is.

    **Returns:**

    A [`remat_scan.StackResult`][].

    **Raises:** `ValueError` before anything is traced, if a layer reads a value that no layer before it
    has written, a pattern matches no layer, a layer is matched by no pattern, lengths differ,
    layers in one boundary or at the same place of a period have different policies or isolations, or
    `schedule` comes with `overlap` or with a policy that offloads.
    `TypeError` if a layer does not return what it declares, or a period changes the type of `x`.
    """
    nested = Nested(levels=1) if schedule is None else schedule
    if not isinstance(nested, Nested):
        raise TypeError(f"schedule={schedule!r}: a remat_scan.Nested(...) or None is needed.")
    stack = [as_layers(item) for item in layers]
    if nested.states is not None:
        stack = unstack_layers(stack)
    every = [layer for item in stack for layer in expand(item)]
    given = dict(values or {})
    check_order(every, given)
    if not isinstance(boundary, int) or boundary < 1:
        raise ValueError(f"boundary={boundary!r}: a number of layers, at least 1, is needed.")
    if not isinstance(overlap, int) or overlap < 0:
        raise ValueError(f"overlap={overlap!r}: a number of layers, at least 0, is needed.")

    run = Run(
        args,
        PerLayer(per_layer, len(every)),
        key,
        [resolve(p) for p in for_each("policy", policy, every)],
        for_each("isolation", isolation, every),
        boundary,
        overlap,
        nested,
        segment_runner(),
    )
    for i, kind in enumerate(run.isolations):
        check_isolation(kind)
        if overlap and (kind != "barrier" or run.policies[i].offloads):
            raise ValueError(
                f"overlap={overlap} needs isolation='barrier' and a policy that offloads nothing, but "
                f"layer {i} has isolation={kind!r} and policy={str(run.policies[i])!r}."
            )
        if schedule is not None and run.policies[i].offloads:
            raise ValueError(
                f"schedule={schedule} recomputes the layers in a segment from the device, but "
                f"layer {i} has policy={str(run.policies[i])!r}, which offloads. Nest with one that "
                "does not, or offload without a schedule."
            )
    if schedule is not None and overlap:
        raise ValueError(
            f"overlap={overlap} and schedule={schedule}: a segment waits for its own layers, so "
            "nothing could overlap. Give one of them."
        )
    todo = list(_group(stack, run))
    collected: dict[str, dict[int, Any]] = {}
    for start, item in todo:
        if isinstance(item, Stacked):
            x, given, found = run.period(item, start, x, given)
        else:
            x, given, found = run.unrolled(item, start, x, given)
        for i, more in found:
            for name, value in more.items():
                collected.setdefault(name, {})[i] = value
    return StackResult(x, given, collected)


def _group(stack: Sequence[Any], run: Run) -> Iterable[tuple[int, Any]]:
    """Where each run begins, and the run: a `Stacked`, or a list of layers that are unrolled."""
    runs: list[tuple[int, Any]] = []
    index = 0
    for item in stack:
        if isinstance(item, Stacked):
            runs.append((index, item))
        elif runs and isinstance(runs[-1][1], list):
            runs[-1][1].append(item)
        else:
            runs.append((index, [item]))
        index += len(expand(item))
    for start, item in runs:
        length = len(item.period) if isinstance(item, Stacked) else len(item)
        count = length * item.repeats if isinstance(item, Stacked) else length
        size = length * (run.at_once(item, start) if isinstance(item, Stacked) else 1)
        for i in range(start, start + count):
            place = (i - start) % size  # in one iteration of the scan
            head = start + place - place % run.boundary
            _check_equal(run, head, i, "in one boundary" if i < start + size else "in one period")
    return runs


def _check_equal(run: Run, first: int, other: int, how: str) -> None:
    for what, all_of_them in (("policy", run.policies), ("isolation", run.isolations)):
        if all_of_them[first] != all_of_them[other]:
            raise ValueError(
                f"Layers {first} and {other} are {how}, but their {what} is "
                f"{str(all_of_them[first])!r} and {str(all_of_them[other])!r}. Give them the same, or "
                "part them: [*stack_layers(layers[:n]), *stack_layers(layers[n:])]."
            )
