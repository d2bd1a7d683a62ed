"""Checkpoints of a training run, with Orbax: written beside the training, complete or not there."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from .config import Config, load_config
from .quoting import shown

Arrays = dict[str, Any]


class Restored(NamedTuple):
    step: int
    items: dict[str, Any]
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder.

    Orbax writes each into a temporary folder that is renamed when all of it is there, so a process
    killed at any point leaves the last complete one as it was.
    """

    def __init__(self, folder: str | Path, keep: int | None = None):
        """**Arguments:** `keep`: how many to keep, the newest; `None` for all."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=keep is not None
        )
        with _damage_named(Path(folder)):
            self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        with _damage_named(Path(self._manager.directory)):
            return self._manager.latest_step()

    def save(self, step: int, items: dict[str, Any], notes: dict[str, Any]) -> None:
        """Saves pytrees of arrays and a small JSON object. Returns when the arrays may change.

        **Arguments:**

        - `items`: each can be restored alone; its arrays are stored under their names in the tree.
        """
        args = {name: ocp.args.StandardSave(_named(tree)) for name, tree in items.items()}
        self._manager.save(step, args=ocp.args.Composite(notes=ocp.args.JsonSave(notes), **args))

    def restore(self, items: dict[str, Any]) -> Restored:
        """The newest checkpoint.

        **Arguments:**

        - `items`: pytrees of `jax.ShapeDtypeStruct`, whose shardings say where the arrays go.

        **Raises:** `ValueError` if there is none, or if it holds other arrays.
        """
        step = self.latest
        if step is None:
            raise ValueError(f"there is no complete checkpoint in {self._manager.directory}")
        args = {name: ocp.args.StandardRestore(_named(tree)) for name, tree in items.items()}
        with _damage_named(Path(self._manager.directory) / str(step), of=", ".join(items)):
            found = self._manager.restore(
                step, args=ocp.args.Composite(notes=ocp.args.JsonRestore(), **args)
            )
        trees = {
            name: jax.tree.unflatten(
                jax.tree.structure(tree), [found[name][k] for k in _named(tree)]
            )
            for name, tree in items.items()
        }
        return Restored(step, trees, found["notes"])

    def close(self) -> None:
        """Waits until what was saved is on disk."""
        self._manager.close()


@contextlib.contextmanager
def _damage_named(path: Path, of: str = "a training run") -> Iterator[None]:
    """Says which checkpoint it is: Orbax and TensorStore raise every kind for damaged files."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path}: expected a checkpoint of {of}: {type(error).__name__}: {shown(error, 1000)}"
        ) from error


def _named(tree: Any) -> Arrays:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


# -- The folder of a run -----------------------------------------------------------------------------

_IN_PERIODS = "in_periods"


def in_periods(folder: Path) -> bool:
    """Whether the checkpoints of the run in this folder hold the layers in periods."""
    return (folder / _IN_PERIODS).exists()


def claim(folder: Path, config: Config, tokenizer: Path | None, *, periods: bool = False) -> None:
    """Writes what a checkpoint needs to be used later: the config, the tokenizer, and whether the
    layers are in periods. With several processes the first one writes.

    **Raises:** `ValueError` if the folder holds a run of another model.
    """
    if (folder / "config.json").exists() and (found := load_config(folder)) != config:
        old, new = found.to_dict(), config.to_dict()
        changed = ", ".join(f"{k} {old[k]} → {new[k]}" for k in new if old[k] != new[k])
        raise ValueError(f"{folder} holds a run of another model ({changed}); take another folder")
    mark = folder / _IN_PERIODS
    if (folder / "config.json").exists() and mark.exists() != periods:
        raise ValueError(
            f"{folder} holds a run {'with' if mark.exists() else 'without'} --periods, whose "
            "checkpoints are laid out otherwise; go on as it began, or take another folder"
        )
    if jax.process_index() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if periods:
        mark.touch()
    else:
        mark.unlink(missing_ok=True)  # of a run that was killed before it had a config
    write_whole(folder / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")
    if tokenizer is not None:
        path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        write_whole(folder / "tokenizer.json", path.read_text(encoding="utf-8"))


def write_whole(path: Path, text: str) -> None:
    """Writes a file such that readers see the old or the new one, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
