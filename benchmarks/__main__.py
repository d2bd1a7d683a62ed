"""`python -m benchmarks isolation`: makes the rows that are missing, then writes the tables."""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax: plugins must not look for hardware

import jax
import jax.numpy as jnp

from remat_scan import CompilerError, MemoryReport, MissingPluginError, memory_report
from remat_scan._targets import check_installed, parse_target, versions

from .overlap import collectives, copies_from_host
from .results import load, made_by, measure, save
from .stack import ISOLATION, WAYS, Stack
from .tables import tables

DEPTHS = (4, 8, 16, 32, 64)
LENGTHS = (2048, 4096, 8192, 16384, 32768)
STACKS = {"h100:8": (16, 32, 64), "tpu7x:2x2x1": (12,)}


def isolation(options: argparse.Namespace) -> None:
    """Peak of one training step, by way, target and kind of layer."""
    for case, targets in ISOLATION.items():
        for target, stack in targets.items():
            for way in WAYS:
                if way == "no remat" and target != "h100:8":
                    continue
                _row("isolation", case, target, way, stack, options)


def depth(options: argparse.Namespace) -> None:
    """Peak as a function of the number of layers, on h100:8."""
    for layers in DEPTHS:
        for way in ("jax.checkpoint", "loop", "barrier", "loop, input on host"):
            _row("depth", f"{layers} layers", "h100:8", way, Stack(layers), options)


def length(options: argparse.Namespace) -> None:
    """Peak as a function of the tokens of each device, 16 layers on h100:8."""
    for tokens in LENGTHS:
        for way in ("jax.checkpoint", "loop", "barrier"):
            stack = Stack(16, batch=1, length=tokens)
            _row("length", f"{tokens} tokens", "h100:8", way, stack, options, tokens=tokens)


def headline(options: argparse.Namespace) -> None:
    """One training step of all of Gemma-4; each row takes minutes, on TPU a quarter of an hour."""
    from .gemma import CASES, TARGETS

    for target in TARGETS:
        for case, program in CASES.items():
            for way in program.ways():
                key = {"case": case, "target": target, "configuration": way}
                make = functools.partial(program.program, target, way)
                _measured("headline", key, make, options)


def stacks(options: argparse.Namespace) -> None:
    """`run_stack`: periods, overlap, nested schedules, offload and blocks, by depth."""
    from .stacks import WAYS, program

    for target, depths in STACKS.items():
        for layers in depths:
            for way in WAYS:
                key: dict[str, Any] = {"case": f"{layers} layers", "target": target}
                key |= {"configuration": way, "layers": layers}
                make = functools.partial(program, Stack(layers), way)
                _measured("stacks", key, make, options)


def overlap(options: argparse.Namespace) -> None:
    """Collectives beside compute, in the program and in its loops, and on TPU XLA's estimated cycles.

    The estimate is the compiler's own weight of each instruction, as if it ran alone, summed along the
    schedule: waiting for a collective that nothing hides is not in it, nor is contention for memory.
    It compares programs for one target; it predicts no step time."""
    from .stacks import WAYS, program

    for target, layers in {"h100:8": 16, "tpu7x:2x2x1": 8}.items():
        stack = Stack(layers)
        ways: dict[str, Callable[[], Any]] = {
            way: functools.partial(stack.program, way)
            for way in ("jax.checkpoint", "loop", "barrier", "both")
        }
        for way in ("overlap 1", "overlap 2", "periods"):
            options_of = WAYS[way].options
            name = f"barrier, {way}" if "overlap" in options_of else way
            ways[name] = functools.partial(program, stack, way)
        for way, make in ways.items():
            key: dict[str, Any] = {"case": f"{layers} layers", "target": target}
            key |= {"configuration": way, "layers": layers}
            _measured("overlap", key, make, options, lambda report: collectives(report.hlo))


def prefetch(options: argparse.Namespace) -> None:
    """Layer inputs on the host, copied back 0, 1 or 2 layers before they are needed."""
    from .prefetch import DISTANCES, program

    for target, layers in {"h100:8": 32, "tpu7x:2x2x1": 12}.items():
        for isolation in ("loop", "barrier"):
            for distance in (None, *DISTANCES):
                key: dict[str, Any] = {"case": f"{layers} layers", "target": target}
                if distance is None:  # recomputed from inputs that stay
                    way, make = isolation, functools.partial(Stack(layers).program, isolation)
                else:
                    way = f"{isolation}, distance {distance}"
                    make = functools.partial(program, Stack(layers), isolation, distance)
                key |= {"configuration": way, "layers": layers}
                _measured(
                    "prefetch", key, make, options, lambda report: copies_from_host(report.hlo)
                )


def peers(options: argparse.Namespace) -> None:
    """One decoder under `jax.checkpoint`, Equinox, Flax, Haliax and this library; CPU times too.

    FLOPs count each loop over attention's blocks of keys once: how often it runs depends on data."""
    from .peers import DECODERS, PEERS, Decoder, installed, on_cpu, trace_seconds

    for target, depths in DECODERS.items():
        for layers in depths:
            for way in filter(installed, PEERS):
                key: dict[str, Any] = {"case": f"{layers} layers", "target": target}
                key |= {"configuration": way, "layers": layers}
                make = functools.partial(Decoder(layers).program, way)
                _measured(
                    "peers",
                    key,
                    make,
                    options,
                    lambda report, m=make: (
                        {"trace_seconds": round(trace_seconds(m()), 2)} | collectives(report.hlo)
                    ),
                )
    if not (options.only or options.way) and options.target in (None, "cpu"):
        rows = [r | versions(parse_target("cpu")) | made_by() for r in on_cpu(20)]
        save("peers", [r for r in load("peers") if r["target"] != "cpu"] + rows)
        for r in rows:
            print(f"{r['configuration']:<40}{r['step_ratio']:.2f} x")


def overhead(options: argparse.Namespace) -> None:
    """Tracing, compiling and running 24 layers on the CPU of this machine, in one run."""
    layers, width, hidden = 24, 128, 512
    x = jnp.ones((8, 256, width))
    weights = [
        {
            "gate": jnp.full((width, hidden), 0.01),
            "up": jnp.full((width, hidden), 0.01),
            "down": jnp.full((hidden, width), 0.01),
        }
        for _ in range(layers)
    ]
    ways = ("jax.checkpoint", "loop", "barrier", "both")
    stack = Stack(layers, width, hidden, 8, 256, devices=1)
    times: dict[str, dict[str, list[float]]] = {
        w: {"trace": [], "compile": [], "step": []} for w in ways
    }
    for round_ in range(options.rounds + 1):  # the first warms up
        compiled: dict[str, Callable[..., Any]] = {}
        for way in ways:
            jax.clear_caches()
            step: Any = jax.jit(stack.step(way))
            start = time.perf_counter()
            traced = step.trace(weights, x)
            traced_at = time.perf_counter()
            lowered = traced.lower()
            lowered_at = time.perf_counter()
            compiled[way] = lowered.compile()
            compiled_at = time.perf_counter()
            if round_:
                times[way]["trace"].append(traced_at - start)
                times[way]["compile"].append(compiled_at - lowered_at)
        for _ in range(5):
            for way, step in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(step(weights, x))
                if round_:
                    times[way]["step"].append(time.perf_counter() - start)
    base = times["jax.checkpoint"]
    rows = []
    for way in ways:
        row: dict[str, Any] = {"case": "24 layers", "target": "cpu", "configuration": way}
        for part, seconds in times[way].items():
            row[f"{part}_seconds"] = round(statistics.median(seconds), 4)
            ratios = [a / b for a, b in zip(seconds, base[part], strict=True)]
            row[f"{part}_ratio"] = round(statistics.median(ratios), 3)
        row |= versions(parse_target("cpu")) | made_by()
        rows.append(row)
        print(way, {k: v for k, v in row.items() if k.endswith("_ratio")})
    save("overhead", rows)


def _row(
    name: str,
    case: str,
    target: str,
    way: str,
    stack: Stack,
    options: argparse.Namespace,
    **more: Any,
) -> None:
    key = {"case": case, "target": target, "configuration": way, "layers": stack.layers, **more}
    _measured(name, key, lambda: stack.program(way), options)


def _measured(
    name: str,
    key: dict[str, Any],
    program: Callable[[], tuple[Any, ...]],
    options: argparse.Namespace,
    more: Callable[[MemoryReport], dict[str, Any]] = lambda _: {},
) -> None:
    case, target, way = key["case"], key["target"], key["configuration"]
    for wanted, given in ((options.only, case), (options.target, target), (options.way, way)):
        if wanted and wanted != given:
            return
    where = parse_target(target)
    try:
        check_installed(where)
    except MissingPluginError as missing:
        print(missing, file=sys.stderr)
        return

    def make() -> Any:
        print(f"compiling {name}: {case}, {target}, {way} …", flush=True)
        step, *args = program()
        return memory_report(step, *args, target=target)

    try:
        row = measure(name, key, versions(where), make, options.again, more)
    except CompilerError as error:  # the others are still worth having
        print(f"{case}, {target}, {way}: {str(error)[:300]} …", file=sys.stderr)
        return
    peak = row["peak_bytes"]
    shown = f"{peak / 2**30:.2f} GiB" if peak is not None else "does not fit"
    print(f"{case:<28}{target:<14}{way:<24}{shown}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run in (
        isolation,
        depth,
        length,
        headline,
        stacks,
        overlap,
        prefetch,
        peers,
        overhead,
        tables,
    ):
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.add_argument("--only", metavar="CASE", help="one case")
        command.add_argument("--target", metavar="T", help="one target")
        command.add_argument(
            "--way", "--configuration", metavar="W", help=f"for example {', '.join(WAYS)}"
        )
        command.add_argument("--again", action="store_true", help="also rows that are there")
        command.add_argument("--rounds", type=int, default=5, help="of overhead (5)")
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
