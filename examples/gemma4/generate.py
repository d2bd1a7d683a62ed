"""Generation: `python -m examples.gemma4.generate --help`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from .cache import Cache, extend
from .command import model_folder, run_command
from .config import Config, load_config
from .data import load_tokenizer
from .model import Gemma4
from .quoting import shown
from .sharding import make_mesh, shardings
from .weights import abstract
from .weights import load as load_weights


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    ```python
    if temperature == 0:
        return argmax(logits)
    keep the top_k largest logits, divided by the temperature
    of these keep the most probable ones, until their probabilities reach top_p
    return one of them, drawn by softmax
    ```
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"the temperature must be from 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Float[Array, "B V"], key: PRNGKeyArray) -> Int[Array, " B"]:
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if self.top_k is None and self.top_p == 1:
            return jax.random.categorical(key, logits)
        count = min(self.top_k or logits.shape[-1], logits.shape[-1])
        logits, ids = jax.lax.top_k(logits, count)
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(before < self.top_p, logits, -jnp.inf)
        choice = jax.random.categorical(key, logits)
        return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0]


class Generated(NamedTuple):
    """**Attributes:** `tokens` holds each row's new tokens, a stop id included, then padding;
    `lengths` counts them."""

    tokens: Int[Array, "B N"]
    lengths: Int[Array, " B"]


@partial(jax.jit, static_argnames=("max_new_tokens", "sampling", "stop_ids", "dtype"))
def generate(
    model: Gemma4,
    ids: Int[Array, "B T"],
    valid: Bool[Array, "B T"] | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    key: PRNGKeyArray | None = None,
    stop_ids: tuple[int, ...] | None = None,
    dtype: DTypeLike | None = None,
) -> Generated:
    """Continues a batch of prompts.

    **Arguments:**

    - `ids`, `valid`: prompts, the shorter ones padded on the left with `valid` `False`.
    - `max_new_tokens`: how many at most; a row ends earlier at one of `stop_ids`, the config's
        end-of-text ids by default.
    - `key`: for sampling; not needed at temperature 0.
    - `dtype`: of activations and cache; that of the weights by default.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    B, T = ids.shape
    config = model.config
    stop = jnp.array(config.eos_token_ids if stop_ids is None else stop_ids, jnp.int32)
    key = jax.random.key(0) if key is None else key
    dtype = model.embed_tokens.weight.dtype if dtype is None else dtype

    def choose(logits: Array, step: Array | int) -> Array:
        return sampling(logits[:, -1], jax.random.fold_in(key, step)).astype(jnp.int32)

    cache = Cache.empty(config, B, T + max_new_tokens - 1, dtype)  # the last is not fed back
    logits, cache = extend(model, cache, ids, valid, last=1, fresh=True)
    first = choose(logits, 0)
    tokens = jnp.full((B, max_new_tokens), config.pad_token_id, jnp.int32).at[:, 0].set(first)

    def going_on(state: tuple[Any, ...]) -> Array:
        step, _, _, done, _ = state
        return (step < max_new_tokens) & ~done.all()

    def one_more(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, lengths, done, cache = state
        last = jax.lax.dynamic_slice_in_dim(tokens, step - 1, 1, axis=1)
        logits, cache = extend(model, cache, last)
        token = jnp.where(done, config.pad_token_id, choose(logits, step))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
        return step + 1, tokens, lengths + ~done, done | jnp.isin(token, stop), cache

    ones = jnp.ones(B, jnp.int32)
    state = (jnp.int32(1), tokens, ones, jnp.isin(first, stop), cache)
    _, tokens, lengths, _, _ = jax.lax.while_loop(going_on, one_more, state)
    return Generated(tokens, lengths)


def left_pad(
    prompts: Sequence[Sequence[int]], pad: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """`ids` and `valid` of prompts, their common length a multiple of `multiple`."""
    longest = max(map(len, prompts))
    length = -(-longest // multiple) * multiple
    ids = np.full((len(prompts), length), pad, np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[length - len(prompt) :] = prompt
    lengths = np.array([[len(p)] for p in prompts])
    return ids, np.arange(length) >= length - lengths


# -- The command line --------------------------------------------------------------------------------


def load(folder: Path, *, tensor: int = 1, dtype: DTypeLike | None = None) -> Gemma4:
    """The model in a folder: of a training run, its newest checkpoint, or of Hugging Face.

    **Arguments:**

    - `tensor`: how many devices each layer is split over.
    - `dtype`: of the weights; as they are stored by default.
    """
    config, run = load_config(folder), (folder / "checkpoints").is_dir()
    if not run and tensor == 1 and dtype is None:
        return load_weights(folder)
    mesh = make_mesh(tensor=tensor, devices=jax.devices()[:tensor])

    def placed(shapes: Gemma4) -> Gemma4:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings(shapes, mesh, config),
        )

    model = placed(abstract(config, dtype or jnp.float32))
    if not run:
        return load_weights(folder, model)
    from .checkpoints import Checkpoints, in_periods  # Orbax is needed for training runs only

    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        if not in_periods(folder):
            return checkpoints.restore({"model": model}).items["model"]
        stacked = placed(jax.eval_shape(Gemma4.in_periods, model))
        stacked = checkpoints.restore({"model": stacked}).items["model"]
    places = jax.tree.map(lambda x: x.sharding, model)
    return jax.jit(Gemma4.one_by_one, out_shardings=places)(stacked)


def stop_ids(folder: Path, config: Config) -> tuple[int, ...]:
    """The end-of-text ids of the config, and those that `generation_config.json` adds."""
    path = folder / "generation_config.json"
    if not path.exists():
        return tuple(sorted(set(config.eos_token_ids)))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of UTF-8 and of JSON
        raise ValueError(f"{path}: {shown(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {shown(repr(found))}")
    more = found.get("eos_token_id")
    ids = [] if more is None else more if isinstance(more, list) else [more]
    for i in ids:
        if type(i) is not int or not 0 <= i < config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id: expected ids below {config.vocab_size}, the model's "
                f"vocabulary, found {shown(repr(i))}"
            )
    return tuple(sorted({*config.eos_token_ids, *ids}))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code: 0, 1 for a failure, 2 for bad input."""
    options = _parser().parse_args(argv)
    return run_command("generate", lambda: _run(options), debug=options.debug)


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    prompts = options.prompt + [f.read_text(encoding="utf-8") for f in options.prompt_file]
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    model = load(folder, tensor=options.tensor, dtype=options.compute)
    config = model.config
    tokenizer = load_tokenizer(folder if (folder / "tokenizer.json").exists() else None)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} words, the model only {config.vocab_size}"
        )
    encoded = [[config.bos_token_id, *tokenizer.encode(p)] for p in prompts]
    ids, valid = left_pad(encoded, config.pad_token_id, multiple=64)  # few shapes, few compilations
    result = jax.device_get(
        generate(
            model,
            ids,
            valid,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            key=jax.random.key(options.seed),
            stop_ids=stop_ids(folder, config),
        )
    )
    rows = []
    for prompt, row, length in zip(prompts, result.tokens, result.lengths, strict=True):
        tokens = row[:length].tolist()
        rows.append({"prompt": prompt, "text": tokenizer.decode(tokens), "tokens": tokens})
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n\n".join(r["prompt"] + r["text"] for r in rows))
    return 0


_EPILOG = """\
examples:
  python -m examples.gemma4.generate runs/tiny --prompt "def main("
  python -m examples.gemma4.generate gemma-4-E2B --prompt Once --prompt Twice \\
      --temperature 0.8 --top-k 64 --top-p 0.95 --compute bfloat16
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.gemma4.generate",
        description="Continue texts with a Gemma-4 small text decoder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=model_folder, metavar="CHECKPOINT_DIR",
        help="what training wrote to --out, or a Hugging Face checkpoint",
    )  # fmt: skip
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument(
        "--prompt-file", type=Path, action="append", default=[], metavar="FILE", help="repeatable"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 takes the likeliest token (0)",
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="X",
        help="sample from the likeliest tokens that have this probability together (1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (0)")
    parser.add_argument(
        "--compute", choices=("bfloat16", "float32"), help="dtype (that of the weights)"
    )
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="devices each layer is split over (1)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print prompts, texts and tokens as JSON"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
