"""`remat-scan`: a thin shell over the functions of this package."""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

_EPILOG = """\
examples:
  remat-scan doctor                                  what works on this machine
  remat-scan report train:step_and_args --target cpu --target h100:8
  remat-scan verify train:step_and_args --target h100:8
  remat-scan demo                                    train a small decoder, compare the memory
"""

_REPORT_EPILOG = """\
module:fn names a function without arguments that returns (step, *args): what to compile, and arrays
or jax.ShapeDtypeStructs to compile it for. For example, in train.py:

  def step_and_args():
      weights = jax.ShapeDtypeStruct((4096, 4096), "float32")
      return jax.jit(train_step, donate_argnums=0), weights

  remat-scan report train:step_and_args --target tpu7x:2x2x1

Modules are looked for in the current directory first.
"""


class _MistakeError(Exception):
    """Bad input: one clear line for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` and returns the exit code: 0, 1 for a failure, 2 for bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # What is compiled here is for hardware that is elsewhere: plugins must not look for it.
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if argv[:1] == ["demo"]:  # it has options of its own
        from ._demo import main as demo

        return demo(argv[1:])
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except _MistakeError as mistake:
        print(f"remat-scan: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("remat-scan: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="remat-scan",
        description="Measure what a JAX program needs, for hardware that need not be there.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="versions, plugins, and which targets work here")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(run=_doctor)

    targets = commands.add_parser("targets", help="the names that --target takes")
    targets.add_argument("--json", action="store_true", help="print JSON instead of a table")
    targets.set_defaults(run=_targets)

    report = commands.add_parser(
        "report",
        help="compile a program for a target and say what it needs",
        epilog=_REPORT_EPILOG,
        formatter_class=raw,
    )
    report.add_argument("program", metavar="module:fn", help="returns (step, *args); see below")
    report.add_argument(
        "--target", action="append", metavar="T", help="what to compile for; repeatable (cpu)"
    )
    report.add_argument("--top", type=int, default=8, metavar="N", help="buffers to list (8)")
    report.add_argument("--timeout", type=float, metavar="S", help="seconds before giving up")
    report.add_argument("--json", action="store_true", help="print JSON instead of tables")
    report.set_defaults(run=_report)

    proof = commands.add_parser(
        "verify",
        help="prove on the compiled program that isolation and recomputation survived",
        epilog=_REPORT_EPILOG,
        formatter_class=raw,
    )
    proof.add_argument("program", metavar="module:fn", help="returns (step, *args); see below")
    proof.add_argument("--target", default="cpu", metavar="T", help="what to compile for (cpu)")
    proof.add_argument("--layers", type=int, metavar="N", help="how many wrapped layers to expect")
    proof.add_argument("--timeout", type=float, metavar="S", help="seconds before giving up")
    proof.add_argument("--json", action="store_true", help="print JSON instead of a table")
    proof.set_defaults(run=_verify)

    for name, text in (
        ("residuals", "what a loss keeps for its backward pass, by layer and tensor; no compiling"),
        ("lint", "why a loss keeps more than it should; no compiling"),
    ):
        traced = commands.add_parser(name, help=text)
        traced.add_argument("program", metavar="module:fn", help="returns (loss, *args)")
        traced.add_argument("--json", action="store_true", help="print JSON instead of a table")
        traced.set_defaults(run=_traced, what=name)

    commands.add_parser(
        "demo", help="train a small decoder on real text and compare the memory (about two minutes)"
    )
    return parser


def _report(options: argparse.Namespace) -> int:
    from ._memory import compare_reports, memory_report

    fn, args = _load(options.program)
    reports = {}
    for target in dict.fromkeys(options.target or ["cpu"]):
        try:
            reports[target] = memory_report(fn, *args, target=target, timeout=options.timeout)
        except (ValueError, ImportError, RuntimeError, TimeoutError) as error:
            raise _MistakeError(_one_line(error)) from None
        except Exception as error:
            raise _MistakeError(f"{options.program}: {_users_line(error)}") from None
    if options.json:
        print(json.dumps({t: json.loads(r.to_json()) for t, r in reports.items()}, indent=1))
    else:
        print("\n\n".join(r.table(options.top) for r in reports.values()))
        if len(reports) > 1:
            print(f"\n{compare_reports(reports)}")
    return 0 if all(r.fits is not False for r in reports.values()) else 1


def _verify(options: argparse.Namespace) -> int:
    from ._verify import verify

    fn, args = _load(options.program)
    try:
        verdict = verify(
            fn, *args, target=options.target, layers=options.layers, timeout=options.timeout
        )
    except (ValueError, ImportError, RuntimeError, TimeoutError) as error:
        raise _MistakeError(_one_line(error)) from None
    except Exception as error:
        raise _MistakeError(f"{options.program}: {_users_line(error)}") from None
    print(json.dumps(json.loads(verdict.to_json()), indent=1) if options.json else verdict)
    return 0 if verdict.ok else 1


def _traced(options: argparse.Namespace) -> int:
    from ._lint import Findings, lint
    from ._residuals import residuals

    fn, args = _load(options.program)
    try:
        result = (lint if options.what == "lint" else residuals)(fn, *args)
    except ValueError as error:
        raise _MistakeError(_one_line(error)) from None
    except Exception as error:
        raise _MistakeError(f"{options.program}: {_users_line(error)}") from None
    print(json.dumps(json.loads(result.to_json()), indent=1) if options.json else result)
    return 1 if isinstance(result, Findings) and not result.ok else 0


def _load(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise _MistakeError(f"expected module:fn, as train:step_and_args, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise _MistakeError(
                f"{module_name} needs {error.name}, which is not installed"
            ) from None
        raise _MistakeError(f"there is no module {error.name!r} here or on the path") from None
    except Exception as error:
        raise _MistakeError(f"importing {module_name}: {_users_line(error)}") from None
    try:
        build = getattr(module, attribute)
    except AttributeError:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise _MistakeError(
            f"{module_name} has no {attribute!r}; it has {', '.join(names)}"
        ) from None
    try:
        built = build()
    except Exception as error:
        raise _MistakeError(f"{name}(): {_users_line(error)}") from None
    if not isinstance(built, tuple) or not built or not callable(built[0]):
        raise _MistakeError(f"{name}() has to return (step, *args), got {type(built).__name__}")
    return built[0], built[1:]


def _doctor(options: argparse.Namespace) -> int:
    import platform

    import equinox as eqx
    import jax.numpy as jnp

    from . import __version__
    from ._memory import memory_report
    from ._targets import check_installed, parse_target, versions

    found = {
        "remat_scan": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "equinox": eqx.__version__,
    }
    works: dict[str, str] = {}
    for target in ("cpu", "cpu:8", "tpu7x:2x2x1", "h100"):
        where = parse_target(target)
        found |= versions(where)
        try:
            check_installed(where)
            square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            memory_report(lambda x: x @ x, square, target=target, timeout=120)
            works[target] = "works"
        except Exception as error:
            works[target] = _one_line(error)
    if options.json:
        print(json.dumps({"versions": found, "targets": works}, indent=1))
        return 0
    print("versions:")
    for name, version in found.items():
        print(f"  {name:<24}{version}")
    print("targets:")
    for target, state in works.items():
        print(f"  {target:<24}{state}")
    return 0


def _targets(options: argparse.Namespace) -> int:
    from ._targets import EXAMPLES, MissingPluginError, check_installed, parse_target

    rows = []
    for name in EXAMPLES:
        target = parse_target(name)
        try:
            check_installed(target)
            installed = True
        except MissingPluginError:
            installed = False
        rows.append({"target": name, "devices": target.devices, "compiler_installed": installed})
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'target':<16}{'devices':>8}  compiler")
    for row in rows:
        state = "installed" if row["compiler_installed"] else "missing"
        print(f"{row['target']:<16}{row['devices']:>8}  {state}")
    print("\nOther sizes work too: cpu:N, a TPU's chips along each axis (v5p:4x4x4), a GPU's :N.")
    return 0


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:600] if text else type(error).__name__


def _users_line(error: BaseException) -> str:
    """An error in the user's own code, with the last of their lines."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if "site-packages" not in f.filename and "remat_scan/_" not in f.filename
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {_one_line(error)}{where}"


if __name__ == "__main__":
    sys.exit(main())
