"""Generation: a cache changes no logits, and a batch changes no row."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import jax
import jax.numpy as jnp
import numpy as np

from examples.gemma4 import attention, generate, weights
from examples.gemma4.cache import Cache, extend
from examples.gemma4.config import FULL, SLIDING, Config, load_config
from examples.gemma4.generate import Sampling, left_pad
from examples.gemma4.model import Gemma4
from examples.gemma4.sharding import make_mesh, shardings

DATA = Path(__file__).parent / "data" / "gemma4"
VARIANTS = ("tiny_e2b", "tiny_e4b")  # windows of 5 and 4 tokens, sequences of 17
TOLERANCE = 5e-5  # float32's noise on these models' logits, as the references' maker measured it

step = jax.jit(extend, static_argnames=("last", "fresh"))


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest) -> tuple[Gemma4, dict[str, np.ndarray]]:
    folder = DATA / request.param
    with np.load(folder / "reference.npz") as reference:
        return weights.load(folder), dict(reference)


@pytest.fixture(scope="module")
def small() -> Gemma4:
    """Three layers, random, for what needs no reference: the last reads the second's K/V."""
    return build(sliding_window=4)


def build(**changes: Any) -> Gemma4:
    kinds = {"layer_types": (SLIDING, FULL, FULL), "num_kv_shared_layers": 1}
    config = dataclasses.replace(load_config(DATA / "tiny_e4b"), **kinds, **changes)
    return jax.jit(lambda key: Gemma4(config, key=key))(jax.random.key(0))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def token_by_token(model: Gemma4, ids: np.ndarray, valid: np.ndarray, prompt: int) -> np.ndarray:
    """The logits of all tokens: of a prompt at once, then of one token after another."""
    cache = Cache.empty(model.config, *ids.shape, jnp.float32)
    logits, cache = step(model, cache, ids[:, :prompt], valid[:, :prompt], fresh=True)
    found = [logits]
    for t in range(prompt, ids.shape[1]):
        logits, cache = step(model, cache, ids[:, t : t + 1], valid[:, t : t + 1])
        found.append(logits)
    return np.concatenate(found, axis=1)


# -- The cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [2, 4, 7, 12])  # below, at and above the window
def test_cached_logits_are_those_of_the_full_forward(
    tiny: tuple[Gemma4, dict[str, np.ndarray]], prompt: int
) -> None:
    model, reference = tiny
    ids = reference["input_ids"]
    found = token_by_token(model, ids, np.ones(ids.shape, bool), prompt)
    close(found, reference["logits"])


@pytest.mark.parametrize("prompt", [3, 11])  # the padding reaches past it, or not
def test_padding_on_the_left(tiny: tuple[Gemma4, dict[str, np.ndarray]], prompt: int) -> None:
    model, reference = tiny
    valid = reference["left.attention_mask"].astype(bool)
    found = token_by_token(model, reference["left.input_ids"], valid, prompt)
    close(found[valid], reference["left.logits"][valid])


def test_chunks_of_any_length_and_only_the_wanted_logits(
    tiny: tuple[Gemma4, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks shorter and longer than the window, also with the kernel that long prompts get."""
    model, reference = tiny
    ids, want = reference["input_ids"], reference["logits"]
    for kernel in ("plain", "blockwise"):
        monkeypatch.setattr(attention, "_best", lambda q, k, mask, name=kernel: name)
        cache, done = Cache.empty(model.config, 2, 20, jnp.float32), 0
        for size, last in ((3, 1), (8, 2), (6, 6)):
            chunk = ids[:, done : done + size]
            extend_once = jax.jit(extend, static_argnames=("last", "fresh"))
            logits, cache = extend_once(model, cache, chunk, last=last)
            done += size
            close(logits, want[:, done - last : done])


def test_slots_are_those_of_transformers(tiny: tuple[Gemma4, dict[str, np.ndarray]]) -> None:
    model, reference = tiny
    config = model.config
    cache = Cache.empty(config, 2, 17, jnp.float32)
    assert len(cache.kv) == config.num_kv_layers
    for i in range(config.num_layers):
        shape = tuple(reference[f"_cache_shape.{i}"])  # [B, K, S, D]; () for a reader
        if shape:
            B, K, S, D = shape
            assert cache.kv[i].k.shape == cache.kv[i].v.shape == (B, S, K, D)
        else:
            assert i >= len(cache.kv)
    # No sliding layer has more slots than there will be tokens.
    assert {kv.k.shape[1] for kv in Cache.empty(config, 1, 3, jnp.float32).kv} == {3}


def test_a_window_of_one_token_needs_no_slots() -> None:
    model = build(sliding_window=1)
    ids = np.random.default_rng(0).integers(3, 83, (1, 6))
    found = token_by_token(model, ids, np.ones(ids.shape, bool), 2)
    close(found, model(ids, policy="none"))


def test_last_out_of_range_is_refused(tiny: tuple[Gemma4, dict[str, np.ndarray]]) -> None:
    model, reference = tiny
    cache = Cache.empty(model.config, 2, 17, jnp.float32)
    with pytest.raises(ValueError, match="last must be from 1 to the 17 new tokens, got 18"):
        extend(model, cache, reference["input_ids"], last=18)


# -- Generating ----------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(
    tiny: tuple[Gemma4, dict[str, np.ndarray]],
) -> None:
    model, reference = tiny
    prompt, want = reference["decode.prompt"], reference["decode.tokens"]
    close(
        token_by_token(
            model, np.concatenate([prompt, want], 1), np.ones((2, prompt.shape[1] + 10), bool), 7
        )[:, 6:],
        reference["decode.step_logits"],
    )
    result = generate.generate(model, prompt, max_new_tokens=10, stop_ids=())
    np.testing.assert_array_equal(result.tokens, want)
    assert result.lengths.tolist() == [10, 10]


def test_rows_of_a_batch_do_not_see_each_other_and_stop_by_themselves(small: Gemma4) -> None:
    model = small
    rows = [[5, 17, 60, 3, 22, 9, 41, 80, 12], [33, 7, 52]]
    alone = [
        generate.generate(model, np.array([row]), max_new_tokens=6, stop_ids=()).tokens[0].tolist()
        for row in rows
    ]
    ids, valid = left_pad(rows, 0, multiple=4)
    assert ids.shape == (2, 12)
    together = generate.generate(model, ids, valid, max_new_tokens=6, stop_ids=())
    assert together.tokens.tolist() == alone
    # A row ends with its stop id; what follows is padding, and the other row goes on.
    stop = alone[0][2]
    cut = alone[0].index(stop) + 1
    stopped = generate.generate(model, ids, valid, max_new_tokens=6, stop_ids=(stop,))
    assert stopped.tokens[0].tolist() == alone[0][:cut] + [0] * (6 - cut)
    assert stopped.lengths[0] == cut
    if stop not in alone[1]:
        assert stopped.tokens[1].tolist() == alone[1]
        assert stopped.lengths[1] == 6


def test_the_same_tokens_with_each_layer_on_two_devices(small: Gemma4) -> None:
    model = small
    prompt = np.array([[5, 17, 60, 3, 22]])
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    split = jax.device_put(model, shardings(model, mesh, model.config))
    one, two = (
        generate.generate(m, prompt, max_new_tokens=5, stop_ids=()).tokens for m in (model, split)
    )
    np.testing.assert_array_equal(one, two)


def test_in_half_precision_the_cache_is_too(tiny: tuple[Gemma4, dict[str, np.ndarray]]) -> None:
    model, reference = tiny
    ids, exact = reference["input_ids"], reference["logits"]
    cache = Cache.empty(model.config, *ids.shape, jnp.bfloat16)
    first, cache = step(model, cache, ids[:, :6], fresh=True)
    more, cache = step(model, cache, ids[:, 6:])
    assert {kv.k.dtype for kv in cache.kv} == {np.dtype(jnp.bfloat16)}
    # Two sums in bfloat16 differ as much as each does from float32, so the yardstick is how far
    # transformers' own bfloat16 logits are from its float32 ones.
    error = np.abs(np.concatenate([first, more], 1) - exact).mean()
    assert error < 1.5 * np.abs(reference["bf16.logits"] - exact).mean()


# -- Sampling ------------------------------------------------------------------------------------------


def allowed(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities that sampling is to have, by its definition."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: sampling.top_k]
    p = np.exp(logits[kept] / sampling.temperature)
    p /= p.sum()
    count = 1 + int(np.searchsorted(np.cumsum(p), sampling.top_p - 1e-6))
    result = np.zeros(len(logits))
    result[kept[:count]] = p[:count] / p[:count].sum()
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_k=3),
        Sampling(1.0, top_k=100),
        Sampling(1.0, top_p=0.7),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.5, top_k=5, top_p=0.8),
    ],
)
def test_samples_are_drawn_as_defined(sampling: Sampling) -> None:
    logits = np.array([0.3, 2.0, -1.0, 1.2, 0.9, -3.0, 1.9], np.float32)
    draws, n = jax.jit(sampling)(jnp.tile(logits, (20_000, 1)), jax.random.key(0)), 20_000
    found, want = np.bincount(draws, minlength=7) / n, allowed(logits, sampling)
    assert (found[want == 0] == 0).all()
    # Five standard deviations of a share.
    assert (np.abs(found - want) <= 5 * np.sqrt(want * (1 - want) / n) + 1e-9).all()


def test_a_seed_decides(small: Gemma4) -> None:
    model = small
    prompt = np.array([[5, 17, 60, 3, 22]] * 4)
    first, same, other = (
        generate.generate(
            model, prompt, max_new_tokens=6, sampling=Sampling(1.0), key=jax.random.key(seed)
        ).tokens
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    assert (first[0] != first[1]).any()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "the temperature must be from 0, got -1.0"),
        ({"temperature": float("nan")}, "the temperature must be from 0, got nan"),
        ({"top_k": 0}, "top-k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top-p must be above 0 and at most 1, got 0.0"),
    ],
)
def test_sampling_that_means_nothing_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**values)


# -- The command line ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face checkpoint with a tokenizer of its own."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(3, 83)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DATA / "tiny_e4b" / name)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    return tmp_path


def test_a_hugging_face_checkpoint_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "w5 w17 w60", "--prompt", "w9"]
    assert generate.main([str(folder), *prompts, "--max-new-tokens", "5", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    model = weights.load(folder)
    for row, ids in zip(rows, ([2, 5, 17, 60], [2, 9]), strict=True):
        want = generate.generate(model, np.array([ids]), max_new_tokens=5, stop_ids=(1, 7))
        tokens = want.tokens[0, : int(want.lengths[0])].tolist()
        assert row["tokens"] == tokens
        assert row["text"] == " ".join(f"w{t}" if t > 2 else "[UNK]" for t in tokens)
    assert generate.stop_ids(folder, model.config) == (1, 7)


@pytest.mark.parametrize(("periods", "tensor"), [(False, 1), (True, 1), (True, 2)])
def test_a_training_run_goes_on(
    periods: bool, tensor: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    from examples.gemma4.checkpoints import Checkpoints, claim

    config = dataclasses.replace(Config.tiny(), layer_types=(FULL,) * 2, num_kv_shared_layers=0)
    model = jax.jit(lambda key: Gemma4(config, key=key))(jax.random.key(0))
    claim(tmp_path, config, None, periods=periods)
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        trained = model.in_periods() if periods else model
        checkpoints.save(7, {"model": trained, "optimizer": {"count": jnp.zeros(())}}, {})
    (tmp_path / "prompt.txt").write_text("héllo")
    argv = [str(tmp_path), "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "4"]
    assert generate.main([*argv, "--tensor", str(tensor), "--json"]) == 0
    loaded = generate.load(tmp_path, tensor=tensor)
    jax.tree.map(np.testing.assert_array_equal, loaded, model)
    up = loaded.layers[0].mlp.up_proj.weight
    assert up.sharding.shard_shape(up.shape)[0] == config.intermediate_size // tensor
    [row] = json.loads(capfd.readouterr().out)
    ids = [2, *(b + 3 for b in "héllo".encode())]
    want = generate.generate(model, np.array([ids]), max_new_tokens=4)
    assert row["tokens"] == want.tokens[0, : int(want.lengths[0])].tolist()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([str(DATA / "tiny_e2b")], "there is no prompt: give --prompt TEXT or --prompt-file FILE"),
        (
            [str(DATA / "tiny_e2b"), "--prompt", "x"],
            "the tokenizer has 259 words, the model only 89",
        ),
        ([str(DATA), "--prompt", "x"], "/config.json"),
        ([str(DATA / "tiny_e2b"), "--prompt-file", "nowhere"], "nowhere"),
        ([str(DATA / "tiny_e2b"), "--prompt", "x", "--top-k", "0"], "top-k must be at least 1"),
        ([str(DATA / "tiny_e2b"), "--prompt", "x", "--tensor", "99"], "makes a mesh of 99 devices"),
        ([str(DATA / "tiny_e2b"), "--prompt", "x", "--max-new-tokens", "0"], "at least 1, got 0"),
    ],
)
def test_mistakes_get_one_line(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = generate.main(argv)
    except SystemExit as stopped:
        code = stopped.code
    err = capfd.readouterr().err
    assert code == 2
    assert words in err
    assert "Traceback" not in err
