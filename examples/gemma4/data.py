"""Token sequences for training: text files or synthetic ones, addressed by position.

A source is a pure function from a position (how many sequences came before) to sequences, so the
position is all that a checkpoint has to hold, and every process of a cluster makes its own rows.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Int32

from .config import Config
from .quoting import shown


class Tokenizer(Protocol):
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as tokens, after the three special ones (padding 0, end 1, beginning 2)."""

    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return [b + 3 for b in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")


class HuggingFace:
    """A `tokenizer.json` of Hugging Face, without the special tokens that it would add."""

    def __init__(self, path: str | Path):
        """**Raises:** `ValueError` if the file is no tokenizer, `ImportError` without the
        `tokenizers` package."""
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                f"{path} needs the tokenizers package: pip install tokenizers"
            ) from None
        try:
            text = Path(path).read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except (OSError, MemoryError, KeyboardInterrupt, SystemExit):
            raise
        # The package raises bare Exceptions, and where Rust panics not even those.
        except BaseException as error:
            raise ValueError(
                f"{path} is not a Hugging Face tokenizer.json: {shown(error)}"
            ) from None
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer in a `tokenizer.json` or in the folder that holds one; bytes for `None`."""
    if path is None:
        return Bytes()
    path = Path(path)
    return HuggingFace(path / "tokenizer.json" if path.is_dir() else path)


class Source(Protocol):
    """**Attributes:** `fingerprint` tells sources apart: a position means nothing in another."""

    fingerprint: str

    def sequence(self, position: int) -> Int32[np.ndarray, " T"]: ...


class Text:
    """Windows of a text in random order, each once an epoch, each after a beginning-of-text token.

    ```python
    def sequence(position):
        epoch, i = divmod(position, windows)
        start = permutation(seed, epoch)[i] * (length - 1)
        return [bos, *tokens[start : start + length - 1]]
    ```
    """

    def __init__(self, tokens: Int[np.ndarray, " N"], length: int, *, bos: int, seed: int = 0):
        """**Raises:** `ValueError` if the text is shorter than one window."""
        self._body = length - 1
        self._windows = len(tokens) // self._body
        if self._windows < 1:
            raise ValueError(
                f"the text has {len(tokens)} tokens, a sequence of length {length} needs "
                f"{self._body}: give more text or a smaller length"
            )
        self._tokens, self._bos, self._seed = tokens.astype(np.int32), np.int32(bos), seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        content = hashlib.sha256(self._tokens.tobytes()).hexdigest()[:16]
        self.fingerprint = f"text {content} length {length} seed {seed}"

    def sequence(self, position: int) -> Int32[np.ndarray, " T"]:
        epoch, i = divmod(position, self._windows)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(self._windows)
        start = self._order[i] * self._body
        return np.concatenate([[self._bos], self._tokens[start : start + self._body]])


class Synthetic:
    """Random phrases, repeated: a model that learns to copy gets their loss down."""

    def __init__(self, vocab_size: int, length: int, *, seed: int = 0):
        self._vocab, self._length, self._seed = vocab_size, length, seed
        self.fingerprint = f"synthetic {vocab_size} length {length} seed {seed}"

    def sequence(self, position: int) -> Int32[np.ndarray, " T"]:
        rng = np.random.default_rng((self._seed, position))
        phrase = rng.integers(3, self._vocab, rng.integers(4, 17))
        return np.resize(phrase, self._length).astype(np.int32)


def open_source(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: Config,
    length: int,
    *,
    seed: int = 0,
) -> Source:
    """Text from files, or synthetic sequences if there are none.

    **Raises:** `ValueError` if a file is not UTF-8 or the tokenizer knows more words than the model.
    """
    if length < 2:
        raise ValueError(f"a sequence needs at least 2 tokens to predict one, got length {length}")
    if not files:
        return Synthetic(config.vocab_size, length, seed=seed)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} words, the model only {config.vocab_size}"
        )
    ids: list[int] = []
    for file in files:
        try:
            ids += tokenizer.encode(Path(file).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from None
        ids.append(config.eos_token_ids[0])
    return Text(np.asarray(ids), length, bos=config.bos_token_id, seed=seed)


def global_batch(
    source: Source, position: int, shape: tuple[int, int], sharding: NamedSharding
) -> Int32[Array, "B T"]:
    """The sequences from `position` on; each process makes those of its own devices."""

    def rows(index: Any) -> np.ndarray:
        numbers = range(shape[0])[index[0]]
        return np.stack([source.sequence(position + i) for i in numbers])[:, index[1]]

    return jax.make_array_from_callback(shape, sharding, rows)
