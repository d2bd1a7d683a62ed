"""`python -m benchmarks peers`: one decoder, its layers recomputed by this library and by others.

The same layers, loss, optimiser and shardings throughout; only what wraps the layers differs, and with
it how their weights are kept: in a list, as modules, or stacked.
"""

import dataclasses
import functools as ft
import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from examples.gemma4.attention import Mask, attention
from remat_scan import Nested, Stacked, blockwise, checkpointed_layer, run_stack
from remat_scan._flops import count_flops

from .stack import INPUT_ON_HOST, rms_norm

SPECS: dict[str, tuple[str | None, ...]] = {  # as in MaxText: along the width
    "q": ("fsdp", None), "k": ("fsdp", None), "v": ("fsdp", None), "o": (None, "fsdp"),
    "gate": ("fsdp", None), "up": ("fsdp", None), "down": (None, "fsdp"), "start": (None, "fsdp"),
}  # fmt: skip
_NAME = re.compile(rf"\b({'|'.join(SPECS)})\b")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """`layers` of causal attention and a gated MLP, AdamW; `batch` x `length` tokens on each device."""

    layers: int
    width: int = 2048
    hidden: int = 8192
    head: int = 128
    batch: int = 8
    length: int = 8192
    devices: int = 8
    dtype: str = "bfloat16"
    blocks: int = 8  # into which the ways that say so cut their tokens

    def weights(self) -> list[dict[str, Any]]:
        """Shapes of each layer's weights, float32."""
        D, F = self.width, self.hidden
        shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D)}
        shapes |= {"gate": (D, F), "up": (D, F), "down": (F, D)}
        one = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        return [one] * self.layers

    def loss(self, way: str) -> Callable[..., Any]:
        """`(parameters, x) -> mean of the squared outputs`."""
        run = PEERS[way].run

        def loss(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
            x = x + parameters["start"].astype(x.dtype)
            return jnp.mean(run(self, parameters["layers"], x).astype(jnp.float32) ** 2)

        return loss

    def step(self, way: str) -> Callable[..., Any]:
        """One step of AdamW: `((parameters, optimiser's state), x) -> the same`."""
        import optax

        optimizer, loss = optax.adamw(1e-3), self.loss(way)

        def step(state: Any, x: jax.Array) -> Any:
            parameters, moments = state
            gradients = jax.grad(loss)(parameters, x)
            updates, moments = optimizer.update(gradients, moments, parameters)
            return optax.apply_updates(parameters, updates), moments

        return jax.jit(step, donate_argnums=0)

    def parameters(self, way: str, weights: Sequence[dict[str, Any]], start: Any) -> dict[str, Any]:
        """The parameters as this way keeps them."""
        return {"start": start, "layers": PEERS[way].arrange(self, weights)}

    def program(self, way: str) -> tuple[Callable[..., Any], Any, Any]:
        """`(step, state, x)`, described, for any target."""
        import optax

        def state(weights: Any, start: Any) -> Any:
            parameters = self.parameters(way, weights, start)
            return parameters, optax.adamw(1e-3).init(parameters)

        start = jax.ShapeDtypeStruct((self.length, self.width), "float32")
        described = jax.eval_shape(state, self.weights(), start)
        described = jax.tree_util.tree_map_with_path(self._placed, described)
        shape = (self.batch * self.devices, self.length, self.width)
        x = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._sharding("fsdp", None, None))
        return self.step(way), described, x

    def _placed(self, path: Any, leaf: Any) -> Any:
        """A weight, or a moment of it, sharded like every other way's; leading axes are of stacks."""
        names = _NAME.findall(jax.tree_util.keystr(path))
        spec = SPECS[names[-1]] if names and leaf.ndim else ()
        sharding = self._sharding(*[None] * (leaf.ndim - len(spec)), *spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _sharding(self, *spec: str | None) -> NamedSharding | None:
        if self.devices == 1:
            return None
        mesh = AbstractMesh((self.devices,), ("fsdp",), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(*spec))


def mix(decoder: Decoder, w: dict[str, Any], x: jax.Array) -> jax.Array:
    """Causal attention, all heads, before the output's projection."""
    h, heads = rms_norm(x), (*x.shape[:2], -1, decoder.head)
    q, k, v = (jnp.reshape(h @ w[name].astype(x.dtype), heads) for name in ("q", "k", "v"))
    return jnp.reshape(attention(q * decoder.head**-0.5, k, v, Mask(), "blockwise"), x.shape)


def tail(w: dict[str, Any], x: jax.Array, mixed: jax.Array) -> jax.Array:
    """What follows attention; each token alone."""
    o, gate, up, down = (w[name].astype(x.dtype) for name in ("o", "gate", "up", "down"))
    x = x + mixed @ o
    h = rms_norm(x)
    return x + (jax.nn.gelu(h @ gate, approximate=True) * (h @ up)) @ down


def layer(decoder: Decoder, w: dict[str, Any], x: jax.Array) -> jax.Array:
    return tail(w, x, mix(decoder, w, x))


def layer_in_blocks(decoder: Decoder, w: dict[str, Any], x: jax.Array) -> jax.Array:
    """The same, the tail a part of the tokens at a time."""
    size = x.shape[1] // decoder.blocks
    in_blocks = blockwise(tail, axis=(None, 1, 1), size=size)
    return in_blocks(w, x, mix(decoder, w, x))


def layer_by_rows(decoder: Decoder, w: dict[str, Any], x: jax.Array) -> jax.Array:
    """The same, all of the layer on a part of each device's rows at a time."""
    rows = max(1, decoder.batch // decoder.blocks)
    one = ft.partial(layer, decoder)
    by_rows = blockwise(
        one, axis=(None, 0), size=rows * decoder.devices, shards=decoder.devices, out=0
    )
    return by_rows(w, x)


# -- How each keeps the weights and runs the layers ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Peer:
    """`arrange(decoder, weights of each layer)` gives what `run(decoder, that, x)` runs."""

    arrange: Callable[[Decoder, Sequence[dict[str, Any]]], Any]
    run: Callable[[Decoder, Any, jax.Array], jax.Array]
    needs: str | None = None  # a package


def _listed(_: Decoder, weights: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(weights)


def _stacked(_: Decoder, weights: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)


def _unrolled(wrap: Callable[[Any], Any], body: Callable[..., Any] = layer) -> Peer:
    def run(decoder: Decoder, layers: Any, x: jax.Array) -> jax.Array:
        wrapped = wrap(ft.partial(body, decoder))
        for w in layers:
            x = wrapped(w, x)
        return x

    return Peer(_listed, run)


def _periods(body: Callable[..., Any] = layer, **options: Any) -> Peer:
    def run(decoder: Decoder, layers: Any, x: jax.Array) -> jax.Array:
        one = jax.tree_util.Partial(ft.partial(body, decoder), layers)
        return run_stack([Stacked([one], decoder.layers)], x, **options).x

    return Peer(_stacked, run)


def _scan(decoder: Decoder, layers: Any, x: jax.Array) -> jax.Array:
    checkpointed = jax.checkpoint(ft.partial(layer, decoder), prevent_cse=False)
    return jax.lax.scan(lambda x, w: (checkpointed(w, x), None), x, layers)[0]


def _equinox(decoder: Decoder, layers: Any, x: jax.Array) -> jax.Array:
    import equinox as eqx

    for one in layers:
        x = eqx.filter_checkpoint(one)(x)
    return x


def _equinox_modules(decoder: Decoder, weights: Sequence[dict[str, Any]]) -> list[Any]:
    return [_equinox_layer()(w, decoder) for w in weights]


@ft.cache
def _equinox_layer() -> Any:
    import equinox as eqx

    class Layer(eqx.Module):
        weights: dict[str, Any]
        decoder: Decoder = eqx.field(static=True)

        def __call__(self, x: jax.Array) -> jax.Array:
            return layer(self.decoder, self.weights, x)

        @staticmethod
        def init(weights: dict[str, Any], decoder: Decoder) -> "Layer":
            return Layer(weights, decoder)

    return Layer


def _haliax(checkpointing: bool | str) -> Peer:
    def arrange(decoder: Decoder, weights: Sequence[dict[str, Any]]) -> Any:
        haliax: Any = importlib.import_module("haliax")
        axis = haliax.Axis("layers", decoder.layers)
        stacked = haliax.nn.Stacked.init(
            axis, _equinox_layer(), gradient_checkpointing=checkpointing
        )
        return stacked(_stacked(decoder, weights), decoder)

    return Peer(arrange, lambda _, layers, x: layers.fold(x), "haliax")


@ft.cache
def _nnx_layer() -> Any:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, weights: dict[str, Any], decoder: Decoder) -> None:
            self.weights = nnx.Dict({name: nnx.Param(w) for name, w in weights.items()})
            self.decoder = decoder

        @nnx.remat
        def __call__(self, x: jax.Array) -> jax.Array:
            return layer(self.decoder, {n: w[...] for n, w in self.weights.items()}, x)

    return Layer


def _nnx_arrange(decoder: Decoder, weights: Sequence[dict[str, Any]]) -> Any:
    from flax import nnx

    return [nnx.state(_nnx_layer()(w, decoder)) for w in weights]


def _nnx(decoder: Decoder, layers: Any, x: jax.Array) -> jax.Array:
    from flax import nnx

    kind = nnx.graphdef(nnx.eval_shape(lambda: _nnx_layer()(_zeros(decoder), decoder)))
    for state in layers:
        x = nnx.merge(kind, state)(x)
    return x


def _zeros(decoder: Decoder) -> dict[str, jax.Array]:
    return {name: jnp.zeros(w.shape, w.dtype) for name, w in decoder.weights()[0].items()}


def _linen(decoder: Decoder) -> tuple[Any, tuple[int, int]]:
    """The stack of remat_scan, and how it nests: as square as it can be."""
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            weights = {
                name: self.param(name, nn.initializers.zeros, w.shape, w.dtype)
                for name, w in decoder.weights()[0].items()
            }
            return layer(decoder, weights, x)

    outer = next(n for n in range(int(decoder.layers**0.5), 0, -1) if decoder.layers % n == 0)
    lengths = (outer, decoder.layers // outer)
    return nn.remat_scan(Layer, lengths=lengths)(), lengths


def _linen_arrange(decoder: Decoder, weights: Sequence[dict[str, Any]]) -> Any:
    stack, lengths = _linen(decoder)
    stacked = _stacked(decoder, weights)
    x = jax.ShapeDtypeStruct((1, decoder.length, decoder.width), decoder.dtype)
    wanted = jax.eval_shape(stack.init, jax.random.key(0), x)

    def place(path: Any, leaf: Any) -> Any:
        w = stacked[path[-1].key]
        return jnp.reshape(w, (*lengths, *w.shape[1:]))

    return jax.tree_util.tree_map_with_path(place, wanted)


PEERS: dict[str, Peer] = {
    "jax.checkpoint": _unrolled(jax.checkpoint),
    "eqx.filter_checkpoint": Peer(_equinox_modules, _equinox),
    "flax.nnx.remat": Peer(_nnx_arrange, _nnx, "flax"),
    "flax.linen.remat_scan": Peer(
        _linen_arrange, lambda decoder, p, x: _linen(decoder)[0].apply(p, x), "flax"
    ),
    "haliax Stacked": _haliax(True),
    "haliax Stacked, nested": _haliax("nested"),
    "haliax Stacked, offload": _haliax("offload"),
    "scan over stacked layers": Peer(_stacked, _scan),
    "loop": _unrolled(checkpointed_layer(isolation="loop")),
    "barrier": _unrolled(checkpointed_layer(isolation="barrier")),
    "periods": _periods(),
    "periods, nested": _periods(schedule=Nested()),
    "loop, in blocks": _unrolled(checkpointed_layer(isolation="loop"), layer_in_blocks),
    "barrier, in blocks": _unrolled(checkpointed_layer(isolation="barrier"), layer_in_blocks),
    "periods, in blocks": _periods(layer_in_blocks),
    "periods, by rows": _periods(layer_by_rows),
    "barrier, by rows": _unrolled(checkpointed_layer(isolation="barrier"), layer_by_rows),
    "loop, input on host": _unrolled(checkpointed_layer(isolation="loop", policy=INPUT_ON_HOST)),
    "barrier, by rows, input on host": _unrolled(
        checkpointed_layer(isolation="barrier", policy=INPUT_ON_HOST), layer_by_rows
    ),
    "periods, in blocks, input on host": _periods(layer_in_blocks, policy=INPUT_ON_HOST),
    "periods, by rows, input on host": _periods(layer_by_rows, policy=INPUT_ON_HOST),
}
OURS = tuple(PEERS)[8:]
DECODERS = {"h100:8": (16, 32), "tpu7x:2x2x1": (8,)}
SMALL = Decoder(4, width=64, hidden=256, head=32, batch=4, length=256, devices=1, dtype="float32")


def installed(way: str) -> bool:
    package = PEERS[way].needs
    return package is None or importlib.util.find_spec(package) is not None


def trace_seconds(program: tuple[Callable[..., Any], Any, Any], times: int = 3) -> float:
    """Of tracing a step anew: the median, after once to import what is needed."""
    step, *args = program
    seconds = []
    for _ in range(times + 1):
        jax.clear_caches()
        start = time.perf_counter()
        step.trace(*args)  # pyright: ignore[reportFunctionMemberAccess]
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def on_cpu(rounds: int) -> list[dict[str, Any]]:
    """Times of a small decoder's step, of all ways in turn: medians, and of ratios of neighbours."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * SMALL.layers + 2))
    weights = [
        {name: 0.1 * jax.random.normal(next(keys), w.shape) for name, w in one.items()}
        for one in SMALL.weights()
    ]
    start = jax.random.normal(next(keys), (SMALL.length, SMALL.width))
    x = jax.random.normal(next(keys), (SMALL.batch, SMALL.length, SMALL.width))
    ways = [way for way in PEERS if installed(way)]
    gradient: dict[str, Any] = {}
    parameters = {way: SMALL.parameters(way, weights, start) for way in ways}
    rows: dict[str, dict[str, Any]] = {}
    for way in ways:
        traced = jax.jit(jax.value_and_grad(SMALL.loss(way))).trace(parameters[way], x)
        flops, _ = count_flops(traced.jaxpr)
        lowered, before = traced.lower(), time.perf_counter()
        gradient[way] = lowered.compile()
        seconds = time.perf_counter() - before
        rows[way] = {"flops": flops, "compile_seconds": round(seconds, 2)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            before = time.perf_counter()
            jax.block_until_ready(gradient[way](parameters[way], x))
            times[way].append(time.perf_counter() - before)
    base = times[ways[0]][1:]
    for way in ways:
        seconds = times[way][1:]
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        rows[way]["step_seconds"] = round(statistics.median(seconds), 4)
        rows[way]["step_ratio"] = round(statistics.median(ratios), 3)
    key = {"case": f"{SMALL.layers} layers, small", "target": "cpu"}
    return [key | {"configuration": way, **rows[way]} for way in ways]
