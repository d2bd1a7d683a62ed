"""Training: `python -m examples.gemma4.train --help`.

`make_train_step(config, mesh)` and `abstract_state(config, mesh)` are all that a benchmark needs to
compile the same step for hardware that is not there.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, DTypeLike, Float, Int

from remat_scan import POLICY_NAMES, checkpointed_layer, memory_report

from .attention import KERNELS, Kernel, Sharded
from .config import FULL, SLIDING, Config, load_config
from .data import Source, global_batch, load_tokenizer, open_source
from .loss import next_token_loss
from .model import Gemma4
from .sharding import AnyMesh, batch_sharding, make_mesh, on_mesh, replicated_matrices, shardings
from .weights import load as load_weights


def tiny() -> Config:
    """Five layers of all kinds, 0.4 million parameters: trains on a laptop's CPU."""
    return Config(
        vocab_size=384,
        vocab_size_per_layer_input=384,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        layer_types=(SLIDING, SLIDING, FULL, SLIDING, FULL),
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        sliding_window=32,
    )


SIZES: dict[str, Callable[[], Config]] = {"tiny": tiny, "e2b": Config.e2b, "e4b": Config.e4b}


# -- The step ----------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a step changes: float32 weights, and the optimiser's moments beside them."""

    model: Gemma4
    optimizer: Any


class Metrics(NamedTuple):
    """**Attributes:** `loss` in nats a token, without z-loss; `grad_norm` before clipping."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]


Batch = Int[Array, "B T"]
Step = Callable[[State, Batch], tuple[State, Metrics]]


def make_optimizer(
    *,
    learning_rate: float = 3e-4,
    warmup: int = 100,
    steps: int = 1000,
    weight_decay: float = 0.1,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with the gradient clipped to a global norm.

    The learning rate rises over `warmup` steps and falls along a cosine to a tenth at `steps`.
    Matrices decay, vectors do not; `layer_scalar` is a buffer in transformers and stays as it is.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, min(warmup, steps), max(steps, warmup + 1), learning_rate / 10
    )
    return optax.chain(
        optax.masked(optax.set_to_zero(), _layer_scalars),
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_matrices),
    )


def _layer_scalars(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: getattr(path[-1], "name", None) == "layer_scalar", tree
    )


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, tree)


def abstract_state(
    config: Config, mesh: AnyMesh, optimizer: optax.GradientTransformation | None = None
) -> State:
    """The shapes and shardings of a training state; takes no memory."""
    optimizer = make_optimizer() if optimizer is None else optimizer
    shapes = jax.eval_shape(_new_state(config, optimizer), jax.random.key(0))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(shapes, mesh, config),
    )


def init_state(
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    seed: int = 0,
    weights: Path | None = None,
) -> State:
    """A new state, each device making its own part. The same numbers on every mesh.

    **Arguments:** `weights`: a Hugging Face checkpoint to start from instead of random numbers.
    """
    optimizer = make_optimizer() if optimizer is None else optimizer
    abstract = abstract_state(config, mesh, optimizer)
    places = jax.tree.map(lambda x: x.sharding, abstract)
    if weights is None:
        return jax.jit(_new_state(config, optimizer), out_shardings=places)(jax.random.key(seed))
    model = load_weights(weights, abstract.model)
    init: Any = optimizer.init
    return State(model, jax.jit(init, out_shardings=places.optimizer)(model))


def _new_state(config: Config, optimizer: optax.GradientTransformation) -> Callable[..., State]:
    init: Any = optimizer.init  # optax types parameters as pytrees other than modules

    def new_state(key: Array) -> State:
        model = Gemma4(config, key=key)
        return State(model, init(model))

    return new_state


def abstract_batch(mesh: AnyMesh, batch: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=batch_sharding(mesh))


def make_train_step(
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    policy: Any = "full",
    isolation: str = "loop",
    kernel: Kernel = "auto",
    compute: DTypeLike = jnp.bfloat16,
    loss_block: int = 4096,
    z_loss: float = 0.0,
) -> Step:
    """`step(state, batch) -> (state, metrics)` under `jax.jit`, with the state donated.

    **Arguments:**

    - `mesh`: where the state and the batch lie; an abstract one for a step that is only compiled.
    - `policy`, `isolation`: what each layer keeps for the backward pass, and what keeps layers
        apart, as for `remat_scan.checkpointed_layer`.
    - `kernel`: the attention kernel. On several devices each runs it on its own rows and heads.
    - `compute`: the dtype of activations and of the weights where they are used.
    - `loss_block`: how many tokens' logits exist at a time, of all devices together.
    """
    optimizer = make_optimizer() if optimizer is None else optimizer
    places = jax.tree.map(lambda x: x.sharding, abstract_state(config, mesh, optimizer))
    update: Any = optimizer.update  # optax types the parameters as other pytrees than modules
    kernel = _on_each_device(kernel, mesh, config)

    def loss_of(model: Gemma4, batch: Batch) -> tuple[Array, Array]:
        loss = next_token_loss(
            on_mesh(model, mesh),
            batch,
            block_tokens=loss_block,
            z_loss=z_loss,
            dtype=compute,
            policy=policy,
            isolation=isolation,
            kernel=kernel,
        )
        return loss.total, loss.cross_entropy

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        (_, loss), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.model, batch)
        # Where the weights are, so that sums over the batch need not be had by every device.
        gradients = jax.lax.with_sharding_constraint(gradients, places.model)
        updates, moments = update(gradients, state.optimizer, state.model)
        model = jax.tree.map(jnp.add, state.model, updates)
        state = State(model, moments)
        state = jax.lax.with_sharding_constraint(state, places)
        return state, Metrics(loss, optax.tree.norm(gradients))

    return jax.jit(train_step, donate_argnums=0)


def _on_each_device(kernel: Kernel, mesh: AnyMesh, config: Config) -> Kernel:
    if callable(kernel) or math.prod(mesh.shape.values()) == 1:
        return kernel
    heads = "tensor" if config.num_attention_heads % mesh.shape["tensor"] == 0 else None
    return Sharded(kernel, mesh, ("data", "fsdp"), heads)


# -- What a step costs -------------------------------------------------------------------------------


class Flops(NamedTuple):
    """FLOPs of one training step on all devices, a multiply-add counted as two."""

    learnable: int
    attention: int

    @property
    def total(self) -> int:
        return self.learnable + self.attention


def model_flops(config: Config, batch: int, length: int) -> Flops:
    """What the mathematics of a step needs; what remat computes again does not count.

    ```python
    learnable = 6 * batch * length * (size of all matrices that multiply activations)
    attention = sum over layers of 12 * batch * heads * head_dim * visible
    ```

    Six: two FLOPs a multiply-add, once forward and twice backward. The table of the head counts, the
    lookups do not. `visible` is how many pairs of query and key the causal mask leaves: `T(T+1)/2`
    for full attention, `sum(min(t, W) for t in 1..T)` for a window `W`. Twelve: the two products
    with keys and with values, each as above.
    """
    c, d, P = config, config.hidden_size, config.hidden_size_per_layer_input
    weights = c.vocab_size * d + c.num_layers * P * d  # the head and the per-layer projection
    attention = 0
    for i in range(c.num_layers):
        D = c.layer_head_dim(i)
        heads = 2 * c.num_attention_heads + (
            0 if c.donor(i) is not None else 2 * c.num_key_value_heads
        )
        weights += d * (heads * D + 3 * c.layer_intermediate_size(i) + 2 * P)
        W = length if c.layer_types[i] == FULL else min(c.sliding_window, length)
        visible = W * (W + 1) // 2 + (length - W) * W
        attention += 12 * batch * c.num_attention_heads * D * visible
    return Flops(6 * batch * length * weights, attention)


# -- The run -----------------------------------------------------------------------------------------


@dataclass
class Options:
    """The command line; see `--help`."""

    size: str
    weights: Path | None
    text: list[Path]
    tokenizer: Path | None
    batch: int
    length: int
    seed: int
    steps: int
    learning_rate: float
    warmup: int
    weight_decay: float
    clip: float
    z_loss: float
    policy: str
    isolation: str
    kernel: str
    compute: str
    loss_block: int
    data: int
    fsdp: int | None
    tensor: int
    simulate: int | None
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    out: Path | None
    save_every: int
    keep: int
    report: str | None
    json: bool
    debug: bool


def train(options: Options) -> int:
    """Trains, or goes on with a run that was stopped. Returns the exit code."""
    from .checkpoints import Checkpoints, claim

    config = _config(options)
    mesh = make_mesh(options.data, options.fsdp, options.tensor)
    source = open_source(
        options.text, load_tokenizer(options.tokenizer), config, options.length, seed=options.seed
    )
    shape = _batch_shape(options, mesh)
    optimizer = _optimizer(options)
    step_fn: Any = _step(options, config, mesh, optimizer, options.kernel)
    start, position = 0, 0
    checkpoints = None
    if options.out is not None:
        claim(options.out, config, options.tokenizer)
        checkpoints = Checkpoints(options.out / "checkpoints", options.keep)
    with contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext():
        if checkpoints and checkpoints.latest is not None:
            abstract = abstract_state(config, mesh, optimizer)
            start, items, notes = checkpoints.restore(abstract._asdict())
            state = State(**items)
            same = notes["source"] == source.fingerprint
            position = notes["position"] if same else 0
            _say(f"going on after step {start}" + ("" if same else ", with other data"))
        else:
            state = init_state(config, mesh, optimizer, seed=options.seed, weights=options.weights)
        _introduce(state.model, mesh, shape)
        run = _Run(options, mesh, source, shape, model_flops(config, *shape), checkpoints)
        return run.loop(step_fn, state, start, position)


class _Run:
    """The loop and what is written about it."""

    def __init__(
        self,
        options: Options,
        mesh: AnyMesh,
        source: Source,
        shape: tuple[int, int],
        flops: Flops,
        checkpoints: Any,
    ):
        self._options, self._source, self._shape, self._flops = options, source, shape, flops
        self._checkpoints = checkpoints
        self._devices = math.prod(mesh.shape.values())
        self._rows = batch_sharding(mesh)

    def loop(self, step_fn: Any, state: State, start: int, position: int) -> int:
        steps, every = self._options.steps, self._options.save_every
        if start >= steps:
            _say(f"all {steps} steps are done; more need a larger --steps")
            return 0
        saved = start
        with (
            _log(self._options.out, start) as log,
            _progress(start, steps) as show,
            _stop() as stop,
        ):
            batch = self._batch(position)
            show(None, "compiling")
            compiled = step_fn.lower(state, batch).compile()
            before = time.perf_counter()
            for step in range(start + 1, steps + 1):
                state, metrics = compiled(state, batch)
                position += self._shape[0]
                batch = self._batch(position)  # made while the devices work
                loss, grad_norm = float(metrics.loss), float(metrics.grad_norm)
                line = self._line(step, loss, grad_norm, time.perf_counter() - before)
                if not math.isfinite(loss):
                    kept = f"; the checkpoint of step {saved} is kept" if saved else ""
                    raise FloatingPointError(f"the loss is {loss} at step {step}{kept}")
                log(line)
                show(line, "")
                due = step % every == 0 or step == steps or stop.wanted
                if self._checkpoints and due:
                    notes = {"position": position, "source": self._source.fingerprint}
                    self._checkpoints.save(step, state._asdict(), notes)
                    saved = step
                before = time.perf_counter()  # what saving takes is not the step's
                if stop.wanted:
                    show(None, f"stopped after step {step}")
                    return 128 + stop.wanted
        return 0

    def _batch(self, position: int) -> Batch:
        return global_batch(self._source, position, self._shape, self._rows)

    def _line(self, step: int, loss: float, grad_norm: float, seconds: float) -> dict[str, Any]:
        per_device = seconds * self._devices
        return {
            "step": step,
            "loss": loss,
            "perplexity": math.exp(min(loss, 700)),
            "grad_norm": grad_norm,
            "seconds": seconds,
            "tokens_per_second_per_device": math.prod(self._shape) / per_device,
            "tflops_per_second_per_device": self._flops.total / per_device / 1e12,
            "learnable_share": self._flops.learnable / self._flops.total,
            "attention_share": self._flops.attention / self._flops.total,
        }


def report(options: Options) -> int:
    """Compiles the step for another machine and prints what it needs there."""
    from remat_scan._targets import parse_target

    assert options.report is not None
    target = parse_target(options.report)
    config = _config(options)
    # Of a larger target the devices that the axes ask for are used.
    wanted = options.data * (options.fsdp or 1) * options.tensor
    count = target.devices if options.fsdp is None else wanted
    mesh = make_mesh(options.data, options.fsdp, options.tensor, devices=count)
    optimizer = _optimizer(options)
    kernel = options.kernel
    if kernel == "auto":
        sizes = {config.layer_head_dim(i) for i in range(config.num_layers)}
        splash = target.platform == "tpu" and all(D % 128 == 0 for D in sizes)
        kernel = "splash" if splash and options.length >= 128 else "blockwise"
    step_fn = _step(options, config, mesh, optimizer, kernel)
    state = abstract_state(config, mesh, optimizer)
    batch = abstract_batch(mesh, *_batch_shape(options, mesh))
    if math.prod(mesh.shape.values()) == 1:  # one device of the target, whichever
        state, batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch)
        )
    result = memory_report(step_fn, state, batch, target=options.report)
    print(result.to_json() if options.json else result)
    return 0 if result.fits is not False else 1


def _config(options: Options) -> Config:
    return SIZES[options.size]() if options.weights is None else load_config(options.weights)


def _optimizer(options: Options) -> optax.GradientTransformation:
    return make_optimizer(
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        steps=options.steps,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


def _step(
    options: Options,
    config: Config,
    mesh: AnyMesh,
    optimizer: optax.GradientTransformation,
    kernel: str,
) -> Step:
    checkpointed_layer(policy=options.policy)  # a mistake in its name is told at once
    return make_train_step(
        config,
        mesh,
        optimizer,
        policy=options.policy,
        isolation=options.isolation,
        kernel=kernel,
        compute=options.compute,
        loss_block=options.loss_block,
        z_loss=options.z_loss,
    )


def _batch_shape(options: Options, mesh: AnyMesh) -> tuple[int, int]:
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if options.batch % shards:
        raise ValueError(
            f"--batch {options.batch} does not divide among data × fsdp = {shards} devices; take a "
            f"multiple of {shards}"
        )
    return options.batch, options.length


def _introduce(model: Gemma4, mesh: AnyMesh, shape: tuple[int, int]) -> None:
    sizes = [x.size for x in jax.tree.leaves(model)]
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    where = f"{math.prod(mesh.shape.values())} × {jax.devices()[0].device_kind}"
    _say(
        f"{sum(sizes) / 1e6:,.2f} M parameters on {where}{axes and ' as ' + axes}; "
        f"{shape[0]} × {shape[1]} tokens a step"
    )
    left = replicated_matrices(model, mesh)
    for line in left[:3]:
        _say(f"  {line}")
    if len(left) > 3:
        _say(f"  and {len(left) - 3} more matrices; all vectors are on every device")


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _log(folder: Path | None, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes `metrics.jsonl`, a line a step. Steps that were lost are dropped from it first."""
    from .checkpoints import write_whole

    if folder is None or jax.process_index() != 0:
        yield lambda line: None
        return
    path = folder / "metrics.jsonl"
    kept = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off by a kill
                if json.loads(text)["step"] <= start:
                    kept.append(text + "\n")
    write_whole(path, "".join(kept))
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield lambda line: print(json.dumps(line), file=file)


@contextlib.contextmanager
def _progress(start: int, steps: int) -> Iterator[Callable[[dict[str, Any] | None, str], None]]:
    """A bar on a terminal, some twenty lines elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, quiet=jax.process_index() != 0)
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    )
    every = max(1, (steps - start) // 20)

    def show(line: dict[str, Any] | None, note: str) -> None:
        if line is not None:
            note = (
                f"loss {line['loss']:.4f}  perplexity {line['perplexity']:,.2f}  "
                f"{line['tokens_per_second_per_device']:,.0f} tokens/s/device  "
                f"{line['tflops_per_second_per_device']:.3g} TFLOP/s/device "
                f"({line['learnable_share']:.0%} learnable, {line['attention_share']:.0%} attention)"
            )
            bar.update(task, advance=1, description=note)
            if console.is_terminal or (line["step"] % every and line["step"] != steps):
                return
            note = f"step {line['step']}/{steps}  {note}"
        bar.update(task, description=note)
        if not console.is_terminal or note.startswith("stopped"):
            console.print(note, highlight=False, soft_wrap=True)

    with bar:
        task = bar.add_task("", total=steps, completed=start)
        yield show


@dataclass
class _Stop:
    wanted: int = 0  # the signal that asks for it


@contextlib.contextmanager
def _stop() -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM end the run after the step in progress, with a checkpoint; the second ends
    it at once. With several processes the first does: the others could not know to stop with it."""
    stop = _Stop()
    signals = (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else ()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.wanted = number
        signal.signal(number, before[number])

    try:
        before: dict[int, Any] = {s: signal.signal(s, handle) for s in signals}
    except ValueError:  # not in the main thread
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- The command line --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code: 0, 1 for a failure, 2 for bad input."""
    options = Options(**vars(_parser().parse_args(argv)))
    try:
        if options.report is not None:
            # What is compiled is for hardware that is elsewhere: plugins must not look for it.
            if not os.environ.get("JAX_PLATFORMS"):
                jax.config.update("jax_platforms", "cpu")
            return report(options)
        _join(options)
        return train(options)
    except KeyboardInterrupt:
        print("train: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        mistake = isinstance(error, ValueError | OSError | ImportError)
        known = mistake or isinstance(error, FloatingPointError)
        kind = "" if known else f"{type(error).__name__}: "
        print(f"train: {kind}{' '.join(str(error).split())[:1000]}", file=sys.stderr)
        return 2 if mistake else 1


def _join(options: Options) -> None:
    """Settings that must stand before JAX starts."""
    if options.simulate is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.simulate)
    parts = (options.coordinator, options.num_processes, options.process_id)
    if options.coordinator == "auto":
        jax.distributed.initialize()
    elif any(p is not None for p in parts):
        if any(p is None for p in parts):
            raise ValueError("--coordinator, --num-processes and --process-id go together")
        if options.simulate is not None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(*parts)


_EPILOG = """\
examples:
  # a tiny model on a text, on 8 simulated devices
  python -m examples.gemma4.train --text README.md --steps 200 --simulate 8 --out runs/tiny

  # the same command again goes on where it was stopped or killed

  # what E2B needs on hardware that is not here
  python -m examples.gemma4.train --size e2b --batch 8 --length 8192 --report tpu7x:2x2x1

  # fine-tune a Hugging Face checkpoint on two hosts
  python -m examples.gemma4.train --weights gemma-4-E2B --text *.md --out runs/e2b \\
      --coordinator host0:1234 --num-processes 2 --process-id 0   # and 1 on the other
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.gemma4.train",
        description="Train a Gemma-4 small text decoder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model and data")
    one = model.add_mutually_exclusive_group()
    one.add_argument("--size", choices=SIZES, default="tiny", help="random weights (tiny)")
    one.add_argument(
        "--weights", type=_folder, metavar="DIR", help="start from a Hugging Face checkpoint"
    )
    model.add_argument(
        "--text", type=_file, nargs="+", default=[], metavar="FILE",
        help="UTF-8 text to train on (synthetic phrases)",
    )  # fmt: skip
    model.add_argument(
        "--tokenizer", type=_file, metavar="FILE", help="a Hugging Face tokenizer.json (bytes)"
    )
    model.add_argument(
        "--batch", type=_positive, default=8, metavar="N",
        help="sequences a step, of all devices together (8)",
    )  # fmt: skip
    model.add_argument(
        "--length", type=_positive, default=512, metavar="N", help="tokens a sequence (512)"
    )
    model.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="of weights and data (0)"
    )

    optimizer = parser.add_argument_group("optimiser")
    optimizer.add_argument("--steps", type=_positive, default=1000, metavar="N", help="(1000)")
    optimizer.add_argument(
        "--learning-rate", type=_number, default=3e-4, metavar="X", help="(3e-4)"
    )
    optimizer.add_argument("--warmup", type=_natural, default=100, metavar="N", help="steps (100)")
    optimizer.add_argument("--weight-decay", type=_number, default=0.1, metavar="X", help="(0.1)")
    optimizer.add_argument(
        "--clip", type=_number, default=1.0, metavar="X", help="largest norm of a gradient (1)"
    )
    optimizer.add_argument("--z-loss", type=_number, default=0.0, metavar="X", help="weight (0)")

    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--policy", default="full", metavar="NAME",
        help=f"what the backward pass keeps (full): {', '.join(POLICY_NAMES)}",
    )  # fmt: skip
    memory.add_argument(
        "--isolation", choices=("loop", "barrier", "both", "none"), default="loop",
        help="what keeps layers apart (loop)",
    )  # fmt: skip
    memory.add_argument("--kernel", choices=("auto", *KERNELS), default="auto", help="of attention")
    memory.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    memory.add_argument(
        "--loss-block", type=_positive, default=4096, metavar="N",
        help="tokens whose logits exist at a time, of all devices together (4096)",
    )  # fmt: skip
    memory.add_argument(
        "--report", metavar="TARGET",
        help="compile for cpu:8, h100:8, tpu7x:2x2x1, ... and print the memory report; no training",
    )  # fmt: skip
    memory.add_argument("--json", action="store_true", help="print the report as JSON")

    mesh = parser.add_argument_group("devices")
    mesh.add_argument(
        "--data", type=_positive, default=1, metavar="N", help="copies of the weights (1)"
    )
    mesh.add_argument(
        "--fsdp", type=_positive, metavar="N", help="parts the weights are cut in (the rest)"
    )
    mesh.add_argument(
        "--tensor", type=_positive, default=1, metavar="N", help="parts each layer is cut in (1)"
    )
    mesh.add_argument(
        "--simulate", type=_positive, metavar="N", help="use the CPU as N devices in each process"
    )
    mesh.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; `auto` where the cluster tells"
    )
    mesh.add_argument("--num-processes", type=_positive, metavar="N")
    mesh.add_argument("--process-id", type=_natural, metavar="N")

    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", type=Path, metavar="DIR",
        help="for checkpoints and metrics.jsonl; a run found there goes on (nothing is written)",
    )  # fmt: skip
    run.add_argument(
        "--save-every",
        type=_positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (100)",
    )
    run.add_argument(
        "--keep", type=_positive, default=2, metavar="N", help="newest checkpoints kept (2)"
    )
    run.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _positive(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def _folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"there is no {text}/config.json")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
