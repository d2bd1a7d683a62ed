"""`remat-scan demo`: train a small decoder on real text, then compare what each way needs.

The text is the source of Python's own standard library, which every installation has.
"""

import argparse
import dataclasses
import functools as ft
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ._compile import CompilerError
from ._demo_model import Adam, Decoder, LayerSize, Size, loss_in_bits, make_step
from ._layer import checkpointed_layer
from ._memory import MemoryReport, format_bytes, memory_report
from ._targets import MissingPluginError, parse_target


def _call(layer: Any, *args: Any) -> Any:
    return layer(*args)


WAYS: dict[str, Callable[[Any], Any]] = {
    "none": lambda layer: layer,
    # The layer is an argument: `jax.checkpoint` needs a hashable function and a module is none.
    "jax.checkpoint": lambda layer: ft.partial(jax.checkpoint(_call), layer),
    "loop": checkpointed_layer(isolation="loop"),
    "barrier": checkpointed_layer(isolation="barrier"),
    "both": checkpointed_layer(isolation="both"),
}
TARGETS = ("cpu", "h100:8", "tpu7x:2x2x1")
TRAINED_WITH = "loop"
MARGIN = 1.0  # bits per byte that training has to gain

_LAYERS = (
    LayerSize(window=64, hidden=256),
    LayerSize(window=64, hidden=256),
    LayerSize(window=None, hidden=256, kv="donated"),
    LayerSize(window=64, hidden=512),  # a wider MLP
    LayerSize(window=None, hidden=256, kv="shared"),
)
TRAINED = Size(width=128, heads=4, head_dim=32, layers=_LAYERS, batch=8, length=256)


def target_size(target: str) -> Size:
    """What is compiled for a target: large enough that the layers' activations decide."""
    if parse_target(target).platform == "cpu":
        return dataclasses.replace(TRAINED, layers=_LAYERS * 2, length=512)
    # Wide MLPs: the layers' own activations decide, not what is kept between them.
    layers = tuple(dataclasses.replace(s, hidden=s.hidden * 32) for s in _LAYERS)
    if parse_target(target).platform == "tpu":
        layers = layers[2:]  # one of each kind: the TPU compiler takes half a minute for each layer
    return Size(
        width=2048, heads=8, head_dim=128, layers=layers, batch=8, length=512, dtype=jnp.bfloat16
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit code: 0, 1 if something is not as claimed, 2 for bad input."""
    options = _parser().parse_args(argv)
    results: dict[str, Any] = {}
    ok = True
    if not options.no_train:
        results["training"] = training = train(options.steps, options.seconds)
        start, end = training["validation_bits_per_byte"]
        fell = start - end >= MARGIN
        ok &= fell
        print(
            f"validation loss {start:.3f} -> {end:.3f} bits per byte in {training['steps']} steps"
            + ("" if fell else f": it did not fall by {MARGIN}")
        )
    results["equality"] = differences = compare_gradients()
    worst = max(differences.values())
    # The same operations in another order of scheduling: rounding of float32, not more.
    ok &= worst < 1e-4
    print(f"loss and gradients of all ways agree to {worst:.1e} (relative)\n")
    results["memory"] = {}
    for target in options.target or TARGETS:
        print(f"{target}: a training step of {len(target_size(target).layers)} layers", flush=True)
        try:
            reports = measure(target)
        except MissingPluginError as missing:
            print(f"  {missing}\n")
            ok &= not options.target  # asked for by name, it has to be there
            continue
        except CompilerError as error:
            print(f"  {error}\n", file=sys.stderr)
            ok = False
            continue
        print(_table(reports))
        results["memory"][target] = {w: json.loads(r.to_json()) for w, r in reports.items()}
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if ok else 1


# -- Training --------------------------------------------------------------------------------------


def train(steps: int, seconds: float) -> dict[str, Any]:
    """Trains `TRAINED` and returns the losses before and after, on a text that is held out."""
    training, validation = map(_as_bytes, real_text())
    held_out = next(batches(validation, np.random.default_rng(1), 32))
    model = Decoder(TRAINED, key=jax.random.key(0))
    adam = Adam.init(model)
    wrap = WAYS[TRAINED_WITH]
    step = make_step(wrap)
    evaluate = jax.jit(lambda model, text: loss_in_bits(model, text, wrap))
    start_loss = float(evaluate(model, held_out))
    print(f"training on {training.size / 1e6:.1f} MB of Python's standard library", flush=True)
    losses: list[float] = []
    start = time.monotonic()
    for text in batches(training, np.random.default_rng(0), TRAINED.batch):
        model, adam, loss = step(model, adam, text)
        losses.append(float(loss))
        done = len(losses)
        _progress(f"step {done}/{steps}  {losses[-1]:.3f} bits per byte", done, steps)
        if done == steps or time.monotonic() - start > seconds:
            break
    end_loss = float(evaluate(model, held_out))
    return {
        "steps": len(losses),
        "seconds": time.monotonic() - start,
        "bits_per_byte": losses,
        "validation_bits_per_byte": [start_loss, end_loss],
    }


def real_text() -> tuple[str, str]:
    """Python's own source: what is trained on, and what is held out (one file in twenty)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(folder.glob("*.py")):
        try:
            texts.append(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
    if len(texts) < 20:
        raise SystemExit(f"remat-scan demo: no readable Python source in {folder}")
    held_out = texts[::20]
    return "".join(t for i, t in enumerate(texts) if i % 20), "".join(held_out)


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def batches(text: np.ndarray, rng: np.random.Generator, batch: int) -> Iterator[np.ndarray]:
    """Random windows of the text, uint8 `[batch, length + 1]`."""
    window = TRAINED.length + 1
    while True:
        starts = rng.integers(0, len(text) - window, batch)
        yield np.stack([text[s : s + window] for s in starts])


def _progress(line: str, done: int, total: int) -> None:
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == total else "", flush=True)
    elif done % 50 == 0 or done == total:
        print(line, flush=True)


# -- Comparing -------------------------------------------------------------------------------------


def compare_gradients() -> dict[str, float]:
    """For each way, the largest relative difference of loss and gradients from no remat at all."""
    model = Decoder(TRAINED, key=jax.random.key(0))
    text = next(batches(_as_bytes(real_text()[1]), np.random.default_rng(2), 2))
    results = {}
    for way, wrap in WAYS.items():
        value_and_grad = jax.jit(
            jax.value_and_grad(lambda m, w=wrap: loss_in_bits(m, jnp.asarray(text), w))
        )
        results[way] = jax.device_get(value_and_grad(model))

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(a))), 1e-6))

    plain = results.pop("none")
    return {
        way: max(jax.tree.leaves(jax.tree.map(difference, plain, result)))
        for way, result in results.items()
    }


def measure(target: str) -> dict[str, MemoryReport]:
    """Compiles one training step for the target in each way."""
    size = target_size(target)
    devices = parse_target(target).devices
    if devices == 1:
        batch = size.batch
        model = jax.eval_shape(lambda: Decoder(size, key=jax.random.key(0)))
        text = jax.ShapeDtypeStruct((batch, size.length + 1), jnp.uint8)
    else:
        mesh = AbstractMesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))
        size = dataclasses.replace(size, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        model = jax.eval_shape(lambda: Decoder(size, key=jax.random.key(0)))
        model = jax.tree.map(lambda x: _fully_sharded(x, mesh, size.width), model)
        text = jax.ShapeDtypeStruct(
            (size.batch * devices, size.length + 1), jnp.uint8, sharding=size.sharding
        )
    step_count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    adam = Adam(step_count, model, model)
    reports = {}
    for way, wrap in WAYS.items():
        _progress(f"  compiling: {way}", 1, 2)
        reports[way] = memory_report(make_step(wrap), model, adam, text, target=target)
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    return reports


def _fully_sharded(x: Any, mesh: AbstractMesh, width: int) -> Any:
    """Weights are split over all devices along the model's width."""
    spec = [
        "fsdp" if n == width and i == x.shape.index(width) else None for i, n in enumerate(x.shape)
    ]
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )


def _table(reports: dict[str, MemoryReport]) -> str:
    """Memory for each way, and as a share of what `jax.checkpoint` needs."""
    on_cpu = next(iter(reports.values())).peak is None
    figure = "temporaries" if on_cpu else "peak"
    base = getattr(reports["jax.checkpoint"], figure)
    lines = [f"  {'':<16}{figure:>14}{'of jax.checkpoint':>20}{'FLOPs':>12}{'compile':>10}"]
    for way, r in reports.items():
        size = getattr(r, figure)
        share = f"{size / base:.2f}×" if size is not None and base else "–"
        lines.append(
            f"  {way:<16}{format_bytes(size):>14}{share:>20}{r.flops / 1e12:>10,.2f} T"
            f"{r.compile_seconds:>8.1f} s"
        )
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="remat-scan demo",
        description="Train a small decoder of unlike layers on Python's own source, on the CPU, and "
        "compare the memory of its training step in each way. About two minutes on two cores; where "
        "their compilers are installed, one more for h100:8 and some five for tpu7x:2x2x1.",
        epilog="examples:\n  remat-scan demo\n  remat-scan demo --no-train --target h100:8\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, default=100, help="steps to train (100)")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="stop training after this long (75)"
    )
    parser.add_argument("--no-train", action="store_true", help="only compare")
    parser.add_argument(
        "--target", action="append", type=_target, metavar="T",
        help="what to compile for; repeatable (cpu, and h100:8 and tpu7x:2x2x1 where their "
        "compilers are installed)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all numbers to a file")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of steps")
    return int(text)


def _target(text: str) -> str:
    try:
        parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    sys.exit(main())
