"""Training: `python -m examples.gemma4.train --help`."""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import optax

from remat_scan import POLICY_NAMES, checkpointed_layer, memory_report

from .attention import KERNELS
from .command import existing_file, model_folder, natural, non_negative, positive, run_command
from .config import Config, load_config
from .data import load_tokenizer, open_source
from .sharding import AnyMesh, batch_sharding, make_mesh
from .step import (
    State,
    Step,
    abstract_batch,
    abstract_state,
    init_state,
    make_optimizer,
    make_train_step,
    model_flops,
)

SIZES: dict[str, Callable[[], Config]] = {
    "tiny": Config.tiny,
    "e2b": Config.e2b,
    "e4b": Config.e4b,
}


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
    rows: int | None
    periods: bool
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
    # Orbax is needed for training only, not to report what it takes.
    from .checkpoints import Checkpoints, claim
    from .loop import Loop, introduce, say

    config = _config(options)
    mesh = make_mesh(options.data, options.fsdp, options.tensor)
    source = open_source(
        options.text, load_tokenizer(options.tokenizer), config, options.length, seed=options.seed
    )
    shape = _batch_shape(options, mesh)
    optimizer = _optimizer(options)
    step_fn = _step(options, config, mesh, optimizer, options.kernel)
    start, position = 0, 0
    checkpoints = None
    if options.out is not None:
        claim(options.out, config, options.tokenizer, periods=options.periods)
        checkpoints = Checkpoints(options.out / "checkpoints", options.keep)
    with contextlib.closing(checkpoints) if checkpoints else contextlib.nullcontext():
        if checkpoints and checkpoints.latest is not None:
            abstract = abstract_state(config, mesh, optimizer, periods=options.periods)
            start, items, notes = checkpoints.restore(abstract._asdict())
            state = State(**items)
            same = notes["source"] == source.fingerprint
            position = notes["position"] if same else 0
            say(f"going on after step {start}" + ("" if same else ", with other data"))
        else:
            state = init_state(
                config,
                mesh,
                optimizer,
                seed=options.seed,
                weights=options.weights,
                periods=options.periods,
            )
        introduce(state.model, mesh, shape)
        loop = Loop(
            steps=options.steps,
            source=source,
            shape=shape,
            rows=batch_sharding(mesh),
            flops=model_flops(config, *shape),
            folder=options.out,
            checkpoints=checkpoints,
            save_every=options.save_every,
        )
        return loop.run(step_fn, state, start, position)


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
    state = abstract_state(config, mesh, optimizer, periods=options.periods)
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
        rows=options.rows,
        periods=options.periods,
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


# -- The command line --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code: 0, 1 for a failure, 2 for bad input."""
    options = Options(**vars(_parser().parse_args(argv)))
    return run_command("train", lambda: _run(options), debug=options.debug)


def _run(options: Options) -> int:
    if options.report is not None:
        # What is compiled is for hardware that is elsewhere: plugins must not look for it.
        if not os.environ.get("JAX_PLATFORMS"):
            jax.config.update("jax_platforms", "cpu")
        return report(options)
    _join(options)
    return train(options)


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
        "--weights", type=model_folder, metavar="DIR", help="start from a Hugging Face checkpoint"
    )
    model.add_argument(
        "--text", type=existing_file, nargs="+", default=[], metavar="FILE",
        help="UTF-8 text to train on (synthetic phrases)",
    )  # fmt: skip
    model.add_argument(
        "--tokenizer",
        type=existing_file,
        metavar="FILE",
        help="a Hugging Face tokenizer.json (bytes)",
    )
    model.add_argument(
        "--batch", type=positive, default=8, metavar="N",
        help="sequences a step, of all devices together (8)",
    )  # fmt: skip
    model.add_argument(
        "--length", type=positive, default=512, metavar="N", help="tokens a sequence (512)"
    )
    model.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="of weights and data (0)"
    )

    optimizer = parser.add_argument_group("optimiser")
    optimizer.add_argument("--steps", type=positive, default=1000, metavar="N", help="(1000)")
    optimizer.add_argument(
        "--learning-rate", type=non_negative, default=3e-4, metavar="X", help="(3e-4)"
    )
    optimizer.add_argument("--warmup", type=natural, default=100, metavar="N", help="steps (100)")
    optimizer.add_argument(
        "--weight-decay", type=non_negative, default=0.1, metavar="X", help="(0.1)"
    )
    optimizer.add_argument(
        "--clip", type=non_negative, default=1.0, metavar="X", help="largest norm of a gradient (1)"
    )
    optimizer.add_argument(
        "--z-loss", type=non_negative, default=0.0, metavar="X", help="weight (0)"
    )

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
        "--rows", type=positive, metavar="N",
        help="rows of its batch that a device runs through a layer at a time (all)",
    )  # fmt: skip
    memory.add_argument(
        "--periods", action="store_true",
        help="stack the layers that repeat: compiles faster; a run stays with what it began with",
    )  # fmt: skip
    memory.add_argument(
        "--loss-block", type=positive, default=4096, metavar="N",
        help="tokens whose logits exist at a time, of all devices together (4096)",
    )  # fmt: skip
    memory.add_argument(
        "--report", metavar="TARGET",
        help="compile for cpu:8, h100:8, tpu7x:2x2x1, ... and print the memory report; no training",
    )  # fmt: skip
    memory.add_argument("--json", action="store_true", help="print the report as JSON")

    mesh = parser.add_argument_group("devices")
    mesh.add_argument(
        "--data", type=positive, default=1, metavar="N", help="copies of the weights (1)"
    )
    mesh.add_argument(
        "--fsdp", type=positive, metavar="N", help="parts the weights are cut in (the rest)"
    )
    mesh.add_argument(
        "--tensor", type=positive, default=1, metavar="N", help="parts each layer is cut in (1)"
    )
    mesh.add_argument(
        "--simulate", type=positive, metavar="N", help="use the CPU as N devices in each process"
    )
    mesh.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; `auto` where the cluster tells"
    )
    mesh.add_argument("--num-processes", type=positive, metavar="N")
    mesh.add_argument("--process-id", type=natural, metavar="N")

    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", type=Path, metavar="DIR",
        help="for checkpoints and metrics.jsonl; a run found there goes on (nothing is written)",
    )  # fmt: skip
    run.add_argument(
        "--save-every",
        type=positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (100)",
    )
    run.add_argument(
        "--keep", type=positive, default=2, metavar="N", help="newest checkpoints kept (2)"
    )
    run.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
