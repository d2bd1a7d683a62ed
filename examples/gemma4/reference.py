"""A saved reference: what another implementation computed from the same checkpoint.

It is an `.npz` file with `input_ids` [B,T] and `logits` [B,T,V], and what else was recorded: the
same under `padded.` and `left.` with an `attention_mask`; `decode.prompt`, `decode.tokens` and
`decode.step_logits`; intermediates (`inputs_embeds`, `ple`, `final_norm_out`, `attn_out.i`,
`mlp_out.i`, `layer_out.i` of layer i); `loss`, the mean cross-entropy of the next token, and its
gradients `grad.<key of the checkpoint>`.
"""

import contextlib
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from .config import Config
from .quoting import shown

INTERMEDIATES = ("inputs_embeds", "ple", "final_norm_out", "attn_out", "mlp_out", "layer_out")

# What Python's zip reader raises for damaged and for encrypted files.
_BROKEN = (zipfile.BadZipFile, RuntimeError, zlib.error, EOFError)
# Beyond that, once the file is open: offsets that lead out of it.
_DAMAGED = (OSError, *_BROKEN)


class Reference:
    """The arrays of an `.npz` file, which may come from a stranger.

    Nothing in it is executed, and an array is read only if its header fits both what is wanted and
    the size of the file.
    """

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
        except _BROKEN as error:
            raise ValueError(f"{path}: expected an .npz file: {shown(error)}") from error
        self.path = path
        files = (i.filename for i in self._zip.infolist())
        self.names = {name.removesuffix(".npy") for name in files if name.endswith(".npy")}

    def shape(self, name: str) -> tuple[int, ...]:
        with self._member(name) as (_, shape, _):
            return shape

    def read(self, name: str, shape: tuple[int | None, ...], kinds: str = "f") -> Any:
        """**Arguments:** `shape`: what is wanted, `None` for any size; `kinds`: NumPy's dtype kinds."""
        with self._member(name) as (file, found, dtype):
            fits = len(found) == len(shape) and all(
                w in (None, n) for w, n in zip(shape, found, strict=True)
            )
            if not fits or dtype.kind not in kinds or 0 in found:
                wanted = ", ".join("any" if n is None else str(n) for n in shape)
                types = " or ".join({"f": "float", "i": "int", "b": "bool"}[k] for k in kinds)
                raise ValueError(
                    f"{self.path}: {name}: expected {types} [{wanted}], found {dtype} {list(found)}"
                )
            try:
                file.seek(0)
                return np.lib.format.read_array(file, allow_pickle=False)
            except (ValueError, *_DAMAGED) as error:
                raise ValueError(f"{self.path}: {name}: corrupted: {shown(error)}") from error

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, tuple[int, ...], np.dtype]]:
        if name not in self.names:
            raise ValueError(f"{self.path} has no {name!r}")
        info = self._zip.getinfo(name + ".npy")
        # NumPy stores or deflates, which packs a thousandfold at best.
        known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if not known or info.file_size > 1100 * info.compress_size + 1024:
            raise ValueError(
                f"{self.path}: {name}: expected {info.file_size} bytes, stored or deflated, found "
                f"{info.compress_size} by method {info.compress_type}"
            )
        with contextlib.ExitStack() as stack:
            # A header is parsed as Python, which would open files to show what it warns about.
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            try:
                file = stack.enter_context(self._zip.open(info))
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[np.lib.format.read_magic(file)]
                shape, _, dtype = read(file)
            except Exception as error:  # NumPy lets those of Python's own parser through
                raise ValueError(
                    f"{self.path}: {name}: not a NumPy array: {shown(error)}"
                ) from error
            if file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
                raise ValueError(
                    f"{self.path}: {name}: expected {math.prod(shape) * dtype.itemsize} bytes for "
                    f"{dtype} {list(shape)}, found {info.file_size - file.tell()}"
                )
            yield file, shape, dtype


class Batch(NamedTuple):
    """Tokens, and the reference's logits of those from `start` on."""

    name: str
    ids: Int[np.ndarray, "B T"]
    valid: Bool[np.ndarray, "B T"] | None
    start: int
    logits: Float[np.ndarray, "B S V"]


def batches(reference: Reference, config: Config) -> Iterator[Batch]:
    """What the reference has logits for: its batch, and the padded and decoded ones if it has them."""
    V = config.vocab_size
    words = min(V, config.vocab_size_per_layer_input)

    def read_ids(name: str, rows: int | None = None) -> Any:
        ids = reference.read(name, (rows, None), "i")
        if ids.min() < 0 or ids.max() >= words:
            raise ValueError(
                f"{reference.path}: {name}: expected ids below {words}, the model's vocabulary, found "
                f"{ids.min()} to {ids.max()}"
            )
        return ids.astype(np.int32)

    for prefix in ("", "padded.", "left."):
        if prefix and prefix + "logits" not in reference.names:
            continue
        ids = read_ids(prefix + "input_ids")
        valid = None
        if prefix + "attention_mask" in reference.names:
            valid = reference.read(prefix + "attention_mask", ids.shape, "ib") != 0
            if not valid.any():
                raise ValueError(f"{prefix}attention_mask: expected a valid token, found none")
        logits = reference.read(prefix + "logits", (*ids.shape, V))
        yield Batch(prefix.removesuffix(".") or "batch", ids, valid, 0, logits)
    if "decode.step_logits" in reference.names:
        prompt = read_ids("decode.prompt")
        ids = np.concatenate([prompt, read_ids("decode.tokens", len(prompt))], axis=1)
        start = prompt.shape[1] - 1
        logits = reference.read("decode.step_logits", (len(ids), ids.shape[1] - start, V))
        yield Batch("decode", ids, None, start, logits)
