"""What the commands of this folder have in common: their exit codes and the types of their options."""

import argparse
import contextlib
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run_command(name: str, body: Callable[[], int], *, debug: bool, failure: int = 1) -> int:
    """Runs a command; an error becomes one line on standard error.

    **Arguments:**

    - `name`: of the command, which begins the line.
    - `body`: returns the exit code.
    - `debug`: show the error's traceback too.
    - `failure`: the exit code of an error that is not the user's.

    **Returns:** what `body` does, 2 for bad input, 130 for an interruption.
    """
    try:
        return body()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        mistake = isinstance(error, ValueError | OSError | ImportError)
        kind = "" if mistake or isinstance(error, FloatingPointError) else type(error).__name__
        said = ": ".join(filter(None, (name, kind, " ".join(str(error).split())[:1000])))
        print(said, file=sys.stderr)
        return 2 if mistake else failure


# -- Types of options --------------------------------------------------------------------------------


def positive(text: str) -> int:
    return _integer(text, 1)


def natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def non_negative(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def model_folder(text: str) -> Path:
    """A folder with the model's config."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"there is no {text}/config.json")
    return Path(text)
