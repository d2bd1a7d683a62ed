"""Weights from and to a Hugging Face checkpoint: a folder with a `config.json` and safetensors files.

Files may come from strangers. Everything that they say about themselves is checked before the first
number is read: what does not fit is an error that names the tensor, never a model with holes.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.experimental import multihost_utils
from jaxtyping import Array, DTypeLike

from .config import Config, load_config
from .model import Gemma4
from .quoting import shown

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# transformers' prefixes of the text decoder's keys, alone and inside the multimodal model, and of
# what else the latter has.
_TEXT, _MULTIMODAL = "model.", "model.language_model."
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
# Google's releases also hold these for layers that read another's keys and values.
_DEAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
_BLOCK_BYTES = 64 * 2**20


def load(folder: str | Path, like: Gemma4 | None = None) -> Gemma4:
    """The model in a Hugging Face checkpoint of Gemma-4 E2B or E4B, or of their shape.

    Each device's part of a tensor is read from the file straight into place: beside the model, no
    more than the part that is being read is in memory.

    Reads `Gemma4ForCausalLM` and the text part of multimodal checkpoints, in one file or in many.
    Keys and values of layers that read another layer's, which are in some checkpoints and have no
    meaning, are left aside.

    **Arguments:**

    - `folder`: has a `config.json`, and `model.safetensors` or `model.safetensors.index.json`.
    - `like`: the model as arrays or as `jax.ShapeDtypeStruct`s, whose dtypes and shardings the
        result gets. Without it the dtypes are the file's, and all is on JAX's first device.

    **Raises:** `ValueError` if the config, a file or a tensor is not what it should be. It lists every
    tensor that is missing, superfluous, mis-shaped, cut off or has numbers that are not finite, with
    what was expected and found. `OSError` if a file cannot be read.
    """
    folder = Path(folder)
    config = load_config(folder)
    wanted = abstract(config) if like is None else like
    if wanted.config != config:
        raise ValueError(f"{folder} holds another model: {_differences(wanted.config, config)}")
    leaves, treedef = jax.tree.flatten(wanted)
    with _opened(folder) as found:
        prefix = _MULTIMODAL if any(key.startswith(_MULTIMODAL) for key in found) else _TEXT
        keys = [prefix + name for name in _names(wanted)]
        shapes = {key: leaf.shape for key, leaf in zip(keys, leaves, strict=True)}
        _check(folder, config, prefix, shapes, found)
        arrays = []
        for key, leaf in zip(keys, leaves, strict=True):
            dtype = _DTYPES[found[key].get_dtype()] if like is None else leaf.dtype
            arrays.append(_read(folder, key, found[key], leaf.shape, dtype, _sharding(leaf)))
    return jax.tree.unflatten(treedef, arrays)


def save(
    model: Gemma4,
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    shard_bytes: int = 2 * 2**30,
) -> None:
    """Writes a checkpoint that `load` and transformers' `Gemma4ForCausalLM` read bit for bit.

    With several processes all call this; the first one writes. One file's tensors at a time are
    gathered. The folder appears under its name when all of it is written.

    **Arguments:**

    - `folder`: must be new or empty.
    - `dtype`: what the weights are rounded to; as they are by default.
    - `shard_bytes`: the size up to which tensors go into one file.

    **Raises:** `ValueError` if the folder is in use.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; save the weights to a new folder")
    tensors = dict(zip((_TEXT + n for n in _names(model)), jax.tree.leaves(model), strict=True))
    sizes = {k: x.size * jnp.dtype(dtype or x.dtype).itemsize for k, x in tensors.items()}
    groups = _group(sizes, shard_bytes)
    writes = jax.process_index() == 0
    partial = folder.with_name(folder.name + ".part")
    if writes:
        partial.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = _SINGLE
        if len(groups) > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        data = {key: _to_host(tensors[key], dtype) for key in group}
        if writes:  # transformers refuses a file that does not say whose format this is
            safetensors.numpy.save_file(data, partial / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    if writes:
        if len(groups) > 1:
            total = {"total_size": sum(sizes.values())}
            index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(partial / _INDEX, index)
        stored = jnp.dtype(dtype or model.embed_tokens.weight.dtype).name
        _write_json(partial / "config.json", {**model.config.to_dict(), "dtype": stored})
        partial.replace(folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder}")


def abstract(config: Config, dtype: DTypeLike = jnp.float32) -> Gemma4:
    """The model without its weights: a `jax.ShapeDtypeStruct` for each. Takes no memory."""
    model = eqx.filter_eval_shape(Gemma4, config, key=jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), model)


def stored_names(model: Gemma4) -> tuple[str, ...]:
    """The checkpoint's key of each of the model's arrays, in the order of `jax.tree.leaves`."""
    return tuple(_TEXT + name for name in _names(model))


def _names(model: Gemma4) -> list[str]:
    # The modules' fields are named after the keys, so there is no table of names.
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


# -- Reading -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a checkpoint, not yet read: safetensors' slices by key."""
    with contextlib.ExitStack() as stack:
        if (folder / _SINGLE).exists():
            yield _tensors(stack, folder / _SINGLE)
            return
        if not (folder / _INDEX).exists():
            raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        where = _read_index(folder / _INDEX)
        found: dict[str, Any] = {}
        for name in sorted(set(where.values())):
            if not (folder / name).exists():
                key = next(k for k, file in where.items() if file == name)
                raise ValueError(
                    f"{folder}: {shown(key)}: expected in {shown(name)}, as {_INDEX} says, "
                    "found no such file"
                )
            tensors = _tensors(stack, folder / name)
            for key in tensors:
                if where.get(key) != name:
                    says = "nothing of it"
                    if key in where:
                        says = f"that it is in {shown(where[key])}"
                    raise ValueError(
                        f"{folder}: {shown(key)}: found in {shown(name)}, but {_INDEX} says {says}"
                    )
            found |= tensors
        for key in where:
            if key not in found:
                raise ValueError(
                    f"{folder}: {shown(key)}: expected in {shown(where[key])}, as {_INDEX} says, "
                    "found not there"
                )
        yield found


def _tensors(stack: contextlib.ExitStack, path: Path) -> dict[str, Any]:
    try:
        file = stack.enter_context(safetensors.safe_open(path, "numpy"))
        return {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: {shown(_diagnosis(path) or error, 1000)}") from error
    except OSError as error:  # whose own text does not say which file
        raise OSError(f"{path}: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of UTF-8 and of JSON
        raise ValueError(
            f"{path}: expected a JSON object with a weight_map: {shown(error)}"
        ) from error
    if not isinstance(index, dict) or "weight_map" not in index:
        raise ValueError(
            f"{path}: expected a JSON object with a weight_map, found {shown(repr(index))}"
        )
    where = index["weight_map"]
    if not isinstance(where, dict):
        raise ValueError(f"{path}: weight_map must be a JSON object, got {shown(repr(where))}")
    for key, name in where.items():
        # A plain name, so that a stranger's index cannot point out of the folder.
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{path}: {shown(key)}: expected the name of a .safetensors file beside it, found "
                f"{shown(repr(name))}"
            )
    return where


def _check(
    folder: Path,
    config: Config,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Any],
) -> None:
    """Raises an error that lists every tensor that is not as the model wants it."""
    ignored = {
        f"{prefix}layers.{i}.self_attn.{name}"
        for i in range(config.num_kv_layers, config.num_layers)
        for name in _DEAD
    }
    towers = tuple(_TEXT + tower for tower in _TOWERS)
    problems = []
    for key in sorted(shapes.keys() | found.keys()):
        if key not in found:
            problems.append(f"{key}: expected {list(shapes[key])}, found nothing")
            continue
        shape, dtype = found[key].get_shape(), found[key].get_dtype()
        if key not in shapes:
            if key not in ignored and not key.startswith(towers):
                problems.append(f"{key}: expected nothing, found {dtype} {shape}")
        elif list(shapes[key]) != shape:
            problems.append(f"{key}: expected {list(shapes[key])}, found {shape}")
        elif dtype not in _DTYPES:
            problems.append(f"{key}: expected {', '.join(_DTYPES)}, found {dtype}")
    if problems:
        listed = [shown(problem, 300) for problem in problems[:20]]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        what = "1 tensor does" if len(problems) == 1 else f"{len(problems)} tensors do"
        raise ValueError(f"{folder}: {what} not fit the config:\n  " + "\n  ".join(listed))


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    sharding = getattr(leaf, "sharding", None)
    return jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding


def _read(
    folder: Path,
    key: str,
    stored: Any,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: jax.sharding.Sharding,
) -> Array:
    def part(index: Any) -> np.ndarray:
        spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        out = np.empty([stop - start for start, stop in spans], dtype)
        (first, last), rest = spans[0], [slice(*s) for s in spans[1:]]
        rows = max(1, _BLOCK_BYTES // (4 * math.prod(out.shape[1:])))
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            block = out[start - first : stop - first]
            with np.errstate(over="ignore"):  # what overflows is found below
                block[...] = stored[(slice(start, stop), *rest)]
            if not (finite := np.isfinite(block)).all():
                at = np.argwhere(~finite)[0]
                where = np.add(at, [start, *(s.start for s in rest)]).tolist()
                raise ValueError(
                    f"{folder}: {key}: expected finite numbers in {np.dtype(dtype).name}, found "
                    f"{block[tuple(at)]} at {where}"
                )
        return out

    return jax.make_array_from_callback(shape, sharding, part)


def _diagnosis(path: Path) -> str | None:
    """Which tensor's entry in a file's header is wrong: safetensors says only that one is.

    The format: 8 bytes with the header's length, the header as JSON, the tensors' bytes without
    gaps. <https://huggingface.co/docs/safetensors>
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            return f"expected a header of {length} bytes, found a file of {size} bytes"
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            return f"expected a header in JSON: {error}"
    if not isinstance(header, dict):
        return f"expected a JSON object as header, found {header!r:.80}"
    header.pop("__metadata__", None)
    have, used, ends = size - 8 - length, 0, {}
    for key, entry in header.items():
        try:
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
            if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
                raise ValueError
            bits = _BITS[dtype] * math.prod(shape)
        except (KeyError, TypeError, ValueError):
            return f"{key}: expected dtype, shape and data_offsets, found {entry!r:.200}"
        if bits != 8 * (end - begin):
            return (
                f"{key}: expected {-(-bits // 8)} bytes for {dtype} {shape}, found data_offsets "
                f"{[begin, end]}"
            )
        if end > have:
            return (
                f"{key}: expected bytes {begin} to {end} of the data, found a file that ends after "
                f"{have}"
            )
        ends[begin, end] = key
    for (begin, end), key in sorted(ends.items()):
        if begin != used:
            return f"{key}: expected to start at byte {used} of the data, found at {begin}"
        used = end
    return f"expected {used} bytes of data, found {have}" if used != have else None


_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}


def _differences(wanted: Config, found: Config) -> str:
    return ", ".join(
        f"{f.name}: expected {getattr(wanted, f.name)!r}, found {getattr(found, f.name)!r}"
        for f in fields(Config)
        if getattr(wanted, f.name) != getattr(found, f.name)
    )


# -- Writing -----------------------------------------------------------------------------------------


def _group(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Keys in order, cut into runs of up to `limit` bytes; a larger tensor is alone."""
    groups: list[list[str]] = []
    room = -1
    for key, size in sizes.items():
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(key)
        room -= size
    return groups


def _to_host(x: Array, dtype: DTypeLike | None) -> np.ndarray:
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x).astype(dtype or x.dtype, copy=False)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
