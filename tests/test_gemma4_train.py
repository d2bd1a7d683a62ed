"""Training: the same losses however the work is split, and nothing lost to a kill."""

import contextlib
import dataclasses
import functools as ft
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

optax = pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from examples.gemma4 import data, loop, train, weights
from examples.gemma4.checkpoints import Checkpoints, claim
from examples.gemma4.config import FULL, SLIDING, Config, load_config
from examples.gemma4.model import Gemma4
from examples.gemma4.sharding import (
    batch_sharding,
    make_mesh,
    on_mesh,
    replicated_matrices,
    shardings,
)
from examples.gemma4.step import (
    State,
    abstract_batch,
    abstract_state,
    init_state,
    make_optimizer,
    make_train_step,
    model_flops,
)
from remat_scan._flops import count_flops

ROOT = Path(__file__).parent.parent
TEXT = Path(sysconfig.get_paths()["stdlib"], "argparse.py")  # real text that everybody has

SMALL = dataclasses.replace(
    Config.tiny(),
    hidden_size=32,
    intermediate_size=64,
    layer_types=(SLIDING, FULL, FULL),  # the last reads the keys and values of the second
    num_kv_shared_layers=1,
)
STEPS, BATCH, LENGTH = 12, 8, 32
# Each mesh sums in an order of its own, which a loss of 6 shows as one or two roundings of 5e-7. How
# fast those grow is up to the learning rate, as AdamW divides each gradient by its own size: in 12
# steps not at all at 0.003, to 3e-6 at 0.01.
SAME = {"rtol": 0, "atol": 1e-5}
# A run that is short: in float32, so that meshes can be compared.
RUN = [
    *("--text", str(TEXT), "--length", str(LENGTH), "--batch", str(BATCH), "--compute", "float32"),
    *("--learning-rate", "0.003", "--warmup", "2", "--steps", str(STEPS), "--save-every", "3"),
    *("--fsdp", "4", "--tensor", "2"),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The programs that these tests and the processes they start have in common."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.3,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]


def start(*argv: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "examples.gemma4.train", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in log_of(folder)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of the short run, which starts from a checkpoint of Hugging Face's kind."""
    folder = tmp_path_factory.mktemp("weights") / "small"
    weights.save(jax.jit(lambda key: Gemma4(SMALL, key=key))(jax.random.key(0)), folder)
    return [*RUN, "--weights", str(folder)]


@pytest.fixture(scope="module")
def finished(run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted, on 8 devices of this process."""
    folder = tmp_path_factory.mktemp("finished")
    assert train.main([*run, "--out", str(folder)]) == 0
    return folder


# -- Placement -------------------------------------------------------------------------------------


def placed(config: Config, **axes: int) -> tuple[State, dict[str, Any]]:
    mesh = make_mesh(**axes, devices=math.prod(axes.values()))
    state = abstract_state(config, mesh)
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): x.sharding.spec
        for path, x in jax.tree_util.tree_leaves_with_path(state.model)
    }
    return state, specs


def test_every_matrix_of_e2b_is_cut_by_fsdp_and_takes_no_memory() -> None:
    before = len(jax.live_arrays())
    state, specs = placed(Config.e2b(), fsdp=8)
    assert len(jax.live_arrays()) <= before + 2  # a key
    assert sum(x.size for x in jax.tree.leaves(state.model)) == pytest.approx(4.629e9, rel=1e-4)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        shard = math.prod(x.sharding.shard_shape(x.shape))
        assert shard * (8 if x.ndim == 2 else 1) == x.size, path
    assert specs["embed_tokens_per_layer.weight"] == PartitionSpec("fsdp", None)
    assert specs["layers.3.self_attn.q_proj.weight"] == PartitionSpec(None, "fsdp")
    assert specs["layers.3.mlp.down_proj.weight"] == PartitionSpec("fsdp", None)
    assert replicated_matrices(state.model, make_mesh(fsdp=8, devices=8)) == []


def test_the_tensor_axis_cuts_heads_but_never_one_head() -> None:
    two = dataclasses.replace(SMALL, num_key_value_heads=2)
    _, specs = placed(two, fsdp=4, tensor=2)
    assert specs["layers.0.self_attn.k_proj.weight"] == PartitionSpec("tensor", "fsdp")
    assert specs["layers.0.self_attn.o_proj.weight"] == PartitionSpec("fsdp", "tensor")
    state, specs = placed(SMALL, fsdp=4, tensor=2)
    assert specs["layers.0.self_attn.k_proj.weight"] == PartitionSpec(None, "fsdp")
    assert specs["layers.0.self_attn.q_proj.weight"] == PartitionSpec("tensor", "fsdp")
    said = replicated_matrices(state.model, make_mesh(fsdp=4, tensor=2, devices=8))
    assert len(said) == 2 * 2
    assert said[0] == "layers.0.self_attn.k_proj.weight [16, 32] is not cut by tensor (2)"


@pytest.mark.parametrize("variant", ["tiny_e2b", "tiny_e4b"])
def test_what_no_axis_divides_is_whole_and_said(variant: str) -> None:
    config = load_config(ROOT / "tests/data/gemma4" / variant)  # 89 or 83 words, 9 or 7 layers
    mesh = make_mesh(fsdp=5, tensor=2, devices=10)
    model = weights.abstract(config)
    said = {line.split()[0] for line in replicated_matrices(model, mesh)}
    for (path, x), place in zip(
        jax.tree_util.tree_leaves_with_path(model),
        jax.tree.leaves(shardings(model, mesh, config)),
        strict=True,
    ):
        place.shard_shape(x.shape)  # raises if an axis does not divide
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        axes = {
            a for part in place.spec if part for a in (part if type(part) is tuple else (part,))
        }
        assert (name in said) == (x.ndim == 2 and axes != {"fsdp", "tensor"}), name


def test_moments_lie_where_their_weights_do() -> None:
    state, _ = placed(SMALL, data=2, fsdp=2, tensor=2)
    adam = next(x for x in jax.tree.leaves(state.optimizer, is_leaf=_is_adam) if _is_adam(x))
    want = [x.sharding for x in jax.tree.leaves(state.model)]
    assert [x.sharding for x in jax.tree.leaves(adam.mu)] == want
    assert [x.sharding for x in jax.tree.leaves(adam.nu)] == want


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def test_one_device_needs_no_placement() -> None:
    model = weights.abstract(SMALL)
    assert on_mesh(model, make_mesh(devices=1)) is model


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"fsdp": 3}, "data 1 × fsdp 3 × tensor 1 makes a mesh of 3 devices, but there are 8"),
        ({"tensor": 16}, "makes a mesh of 16 devices, but there are 8"),
        ({"data": 0}, "the data axis must have at least one device, got 0"),
    ],
)
def test_a_mesh_has_as_many_devices_as_there_are(axes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_mesh(**axes, devices=8)


# -- The step --------------------------------------------------------------------------------------


def first_steps(
    run: list[str], devices: int, change: Callable[[State], State] = lambda s: s
) -> tuple[list[float], State, str]:
    """The losses of the run's steps and its state after them, on a mesh of another size; and the
    program. By the functions, without the command line."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    optimizer = make_optimizer(learning_rate=0.003, warmup=2, steps=STEPS)
    state = change(init_state(SMALL, mesh, optimizer, weights=Path(run[-1])))
    step: Any = make_train_step(SMALL, mesh, optimizer, compute="float32", loss_block=64)
    source = data.open_source([TEXT], data.Bytes(), SMALL, LENGTH)
    compiled = step.lower(state, abstract_batch(mesh, BATCH, LENGTH)).compile()
    losses = []
    for i in range(STEPS):
        shape, place = (BATCH, LENGTH), batch_sharding(mesh)
        state, metrics = compiled(state, data.global_batch(source, BATCH * i, shape, place))
        losses.append(float(metrics.loss))
    return losses, state, compiled.as_text()


def test_losses_are_the_same_on_every_mesh(run: list[str], finished: Path) -> None:
    one, state, _ = first_steps(run, 1)
    assert one[0] - one[-1] > 0.5
    scalars = [layer.layer_scalar for layer in state.model.layers]
    assert {float(s[0]) for s in scalars} == {1.0}  # buffers, not weights
    fsdp, _, program = first_steps(run, 8)
    np.testing.assert_allclose(fsdp, one, **SAME)
    np.testing.assert_allclose(losses_of(finished), one, **SAME)  # fsdp × tensor
    # No device ever holds the whole table of per-layer embeddings, nor its whole gradient.
    words, columns = state.model.embed_tokens_per_layer.weight.shape
    assert f"[{words // 8},{columns}]" in program
    assert f"[{words},{columns}]" not in program


def test_periods_are_the_same_training() -> None:
    """The same start, the same places, and after some steps of AdamW that decays the same model."""
    config = dataclasses.replace(SMALL, layer_types=(SLIDING, SLIDING), num_kv_shared_layers=0)
    mesh = make_mesh(fsdp=4, tensor=2)
    optimizer = make_optimizer(learning_rate=0.003, warmup=2, steps=STEPS)
    ids = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, config.vocab_size)
    ids = jax.device_put(ids, batch_sharding(mesh))
    losses, models = {}, {}
    for periods in (False, True):
        state = init_state(config, mesh, optimizer, periods=periods)
        step: Any = make_train_step(
            config, mesh, optimizer, compute="float32", loss_block=64, periods=periods
        )
        losses[periods] = []
        for _ in range(4):
            state, metrics = step(state, ids)
            losses[periods].append(float(metrics.loss))
        models[periods] = state.model
    (stacked,), plain = models[True].layers, models[False].layers
    assert (len(stacked.period), stacked.repeats) == (1, 2)
    np.testing.assert_allclose(losses[True], losses[False], **SAME)
    close = ft.partial(np.testing.assert_allclose, rtol=0, atol=2e-4)
    jax.tree.map(close, models[True].one_by_one(), models[False])
    for together, one in zip(stacked.period, plain, strict=False):
        for a, b in zip(jax.tree.leaves(together.layer), jax.tree.leaves(one), strict=True):
            alone = b.sharding.shard_shape(b.shape)
            assert a.sharding.shard_shape(a.shape) == (2, *alone)
    table = stacked.period[0].own.embed_tokens_per_layer.weight  # words over both axes
    P = config.hidden_size_per_layer_input
    words = config.vocab_size_per_layer_input // 8
    assert table.sharding.shard_shape(table.shape) == (2, words, P)
    assert replicated_matrices(models[True], make_mesh(fsdp=8, devices=8)) == []


@pytest.mark.parametrize("periods", [False, True])
def test_a_run_goes_on_in_periods_only_if_it_began_so(tmp_path: Path, periods: bool) -> None:
    for _ in range(2):
        claim(tmp_path, SMALL, None, periods=periods)
    with pytest.raises(ValueError, match=f"a run {'with' if periods else 'without'} --periods"):
        claim(tmp_path, SMALL, None, periods=not periods)


def test_weights_stay_in_float32_and_are_updated_in_place() -> None:
    mesh = make_mesh(devices=1)
    step: Any = make_train_step(SMALL, mesh)  # computes in bfloat16
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract_state(SMALL, mesh)
    )
    traced = step.trace(state, jax.ShapeDtypeStruct((2, 16), jnp.int32))
    after, metrics = traced.out_info
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert {x.dtype for x in jax.tree.leaves(after.model)} == {np.dtype("float32")}
    assert metrics.loss.dtype == np.dtype("float32")
    [given, batch], _ = traced.args_info
    assert all(x.donated for x in jax.tree.leaves(given))
    assert not batch.donated
    products = [e for e in _equations(traced.jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    # Where a sum is kept in float32, its cotangent comes back so; weights and activations never do.
    assert all(any(v.aval.dtype == jnp.bfloat16 for v in e.invars) for e in products)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: _jaxpr_of(x) is not None
        ):
            if (found := _jaxpr_of(inner)) is not None:
                yield from _equations(found)


def _jaxpr_of(value: Any) -> Any:
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def test_the_gradient_is_clipped_and_vectors_do_not_decay() -> None:
    tree = {"matrix": jnp.full((2, 3), 4.0), "vector": jnp.full(3, 4.0)}
    optimizer = make_optimizer(learning_rate=1.0, warmup=0, clip=1.0, weight_decay=0.5)
    zero = jax.tree.map(jnp.zeros_like, tree)
    update, _ = optimizer.update(zero, optimizer.init(tree), tree)
    np.testing.assert_allclose(update["matrix"], -0.5 * 4.0)
    np.testing.assert_allclose(update["vector"], 0)
    _, moments = optimizer.update(jax.tree.map(lambda x: 100 * x, tree), optimizer.init(tree), tree)
    adam = next(x for x in jax.tree.leaves(moments, is_leaf=_is_adam) if _is_adam(x))
    np.testing.assert_allclose(optax.tree.norm(adam.mu), 0.1, rtol=1e-3)  # 1 - b1


def test_flops_are_those_of_the_traced_program() -> None:
    """The plain kernel has all pairs of tokens, and a block of the loss makes its logits twice."""
    config, B, T = SMALL, 2, 48
    mesh = make_mesh(devices=1)
    step: Any = make_train_step(config, mesh, policy="none", kernel="plain", loss_block=B * T)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract_state(config, mesh)
    )
    traced, exact = count_flops(step.trace(state, jax.ShapeDtypeStruct((B, T), jnp.int32)).jaxpr)
    assert exact
    model = model_flops(config, B, T)
    sizes = [config.layer_head_dim(i) for i in range(config.num_layers)]
    pairs = sum(12 * B * config.num_attention_heads * D * T * T for D in sizes)
    assert traced == model.learnable + pairs + 2 * B * T * config.vocab_size * config.hidden_size
    visible = {"full": sum(range(1, T + 1)), "sliding": sum(min(t, 32) for t in range(1, T + 1))}
    assert model.attention == sum(
        12 * B * 4 * (32 * visible["full"] if kind.startswith("full") else 16 * visible["sliding"])
        for kind in config.layer_types
    )


# -- Runs --------------------------------------------------------------------------------------------


def test_a_run_learns_and_logs(finished: Path) -> None:
    log = log_of(finished)
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    assert log[0]["loss"] - log[-1]["loss"] > 0.5
    flops = model_flops(SMALL, 8, 32)
    for line in log:
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["tokens_per_second_per_device"] == pytest.approx(8 * 32 / 8 / line["seconds"])
        rate = flops.total / 8 / line["seconds"] / 1e12
        assert line["tflops_per_second_per_device"] == pytest.approx(rate)
        assert line["learnable_share"] + line["attention_share"] == pytest.approx(1)
    kept = {p.name for p in (finished / "checkpoints").iterdir()}
    assert kept == {"9", "12"}  # the newest two


def test_two_processes_train_like_one(run: list[str], finished: Path, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = [*run, "--out", str(tmp_path), "--simulate", "4", "--num-processes", "2"]
    common += ["--coordinator", f"127.0.0.1:{port}"]
    processes = [start(*common, "--process-id", str(i)) for i in range(2)]
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    np.testing.assert_allclose(losses_of(tmp_path), losses_of(finished), **SAME)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"9", "12"}


def kill(process: subprocess.Popen[str], folder: Path, rng: random.Random, saving: bool) -> None:
    """Kills a run some time after a random step; with `saving` in the midst of writing a checkpoint."""
    after = rng.randrange(STEPS - 5 if saving else STEPS)  # with checkpoints left to be written
    deadline = time.monotonic() + 300

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def writing() -> bool:
        return any("tmp" in path.name for path in (folder / "checkpoints").glob("*"))

    def held_while_writing() -> bool:
        if writing():
            process.send_signal(signal.SIGSTOP)
            if writing():
                return True
            process.send_signal(signal.SIGCONT)  # too late
        return False

    wait_for(lambda: lines_of(folder) >= after)
    if saving:
        wait_for(held_while_writing)
    else:
        time.sleep(rng.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert writing() or not saving


def lines_of(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_and_resume(
    run: list[str], finished: Path, folder: Path, seed: int, saving: bool = False
) -> None:
    process = start(*run, "--out", str(folder), "--simulate", "8")
    kill(process, folder, random.Random(seed), saving)
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        saved = checkpoints.latest or 0
    done = lines_of(folder)
    assert saved % 3 == 0
    # A checkpoint is written while training goes on, until the next one is due.
    assert done - saved <= 6, f"seed {seed}: killed at {done}, but the newest is {saved}"
    assert train.main([*run, "--out", str(folder)]) == 0
    assert [line["step"] for line in log_of(folder)] == list(range(1, STEPS + 1))
    assert losses_of(folder) == losses_of(finished), f"seed {seed}"  # bit for bit


def test_a_killed_run_goes_on_bit_for_bit(
    run: list[str], finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kill_and_resume(run, finished, tmp_path, random.SystemRandom().randrange(10**6))
    # On the same mesh; what a finished run is asked to do again is nothing.
    assert train.main([*run, "--out", str(tmp_path)]) == 0
    assert "all 12 steps are done" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere(
    run: list[str], finished: Path, tmp_path: Path, seed: int, saving: bool
) -> None:
    kill_and_resume(run, finished, tmp_path, seed, saving)


def test_a_stopped_run_saves_and_goes_on(
    run: list[str],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make, folder, copy = data.global_batch, tmp_path / "run", tmp_path / "copy"

    def stop_at_five(source: Any, position: int, *rest: Any) -> Any:
        if position == 5 * BATCH:
            signal.raise_signal(signal.SIGTERM)
        return make(source, position, *rest)

    monkeypatch.setattr(loop, "global_batch", stop_at_five)
    assert train.main([*run, "--out", str(folder)]) == 128 + signal.SIGTERM
    assert len(log_of(folder)) == 5
    monkeypatch.undo()
    shutil.copytree(folder, copy)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')  # as a kill may leave it
    assert train.main([*run, "--out", str(folder)]) == 0
    assert losses_of(folder) == losses_of(finished)
    # Other data have no position yet.
    assert train.main([*run, "--out", str(copy), "--seed", "1"]) == 0
    assert "going on after step 5, with other data" in capfd.readouterr().err
    assert losses_of(copy)[:5] == losses_of(finished)[:5]
    assert losses_of(copy)[5] != losses_of(finished)[5]


# -- Data --------------------------------------------------------------------------------------------


def test_an_epoch_has_every_window_once() -> None:
    tokens = np.arange(3, 3 + 95)
    source = data.Text(tokens, 11, bos=2, seed=0)  # 9 windows of 10 tokens
    first = [source.sequence(i) for i in range(9)]
    second = [source.sequence(i) for i in range(9, 18)]
    assert all(s[0] == 2 and len(s) == 11 for s in first)
    assert sorted(t for s in first for t in s[1:]) == tokens[:90].tolist()
    assert sorted(t for s in second for t in s[1:]) == tokens[:90].tolist()
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    np.testing.assert_array_equal(source.sequence(3), first[3])  # whatever came before
    with pytest.raises(ValueError, match="the text has 5 tokens, a sequence of length 11 needs 10"):
        data.Text(tokens[:5], 11, bos=2)


def test_synthetic_sequences_repeat_a_phrase() -> None:
    source = data.Synthetic(384, 64)
    a = source.sequence(7)
    np.testing.assert_array_equal(a, source.sequence(7))
    assert any((a[:-n] == a[n:]).all() for n in range(4, 17))
    assert a.min() >= 3
    assert a.max() < 384


def test_bytes_survive_the_tokenizer() -> None:
    text = "naïve 日本\n\0"
    assert data.Bytes().decode(data.Bytes().encode(text)) == text
    assert min(data.Bytes().encode("\0")) == 3


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "def": 3, "return": 4, "self": 5}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = data.load_tokenizer(tmp_path)
    assert loaded.encode("def self other") == [3, 5, 0]
    assert loaded.decode([4, 5]) == "return self"
    source = data.open_source([TEXT], loaded, Config.tiny(), 16)
    assert set(np.unique(source.sequence(0))) <= {0, 1, 2, 3, 4, 5}
    small = load_config(ROOT / "tests/data/gemma4/tiny_e2b")
    with pytest.raises(ValueError, match="the tokenizer has 259 words, the model only 89"):
        data.open_source([TEXT], data.Bytes(), small, 16)


# -- The command line ----------------------------------------------------------------------------------


def test_the_report_is_of_the_step_and_trains_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--length", "16", "--policy", "none", "--isolation", "none", "--kernel", "plain"]
    monkeypatch.setitem(train.SIZES, "tiny", lambda: SMALL)
    assert train.main([*argv, "--report", "cpu:8", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["devices"] == 8
    weights = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * 4
        for x in jax.tree.leaves(abstract_state(SMALL, make_mesh(fsdp=8, devices=8)))
    )
    assert weights <= found["arguments"] <= 1.05 * weights
    assert found["aliased"] >= weights  # the state is donated


def bad(tmp_path: Path) -> dict[str, tuple[Sequence[str], str]]:
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin1") * 100)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "notes.json").write_text("{}")
    text = ["--text", str(tmp_path / "short.txt")]
    return {
        "policy": (["--policy", "fulll"], "Did you mean 'full'"),
        "batch": (["--batch", "6"], "--batch 6 does not divide among data × fsdp = 8 devices"),
        "mesh": (["--fsdp", "3"], "but there are 8: choose sizes whose product that is"),
        "target": (["--report", "h1000"], "target 'h1000' is not known"),
        "encoding": (["--text", str(tmp_path / "latin1.txt")], "is not UTF-8 text"),
        "short": (text, "give more text or a smaller length"),
        "tokenizer": (
            [*text, "--tokenizer", str(tmp_path / "notes.json")],
            "is not a Hugging Face",
        ),
        "processes": (["--process-id", "0"], "--num-processes and --process-id go together"),
        "no file": (["--text", "nowhere.txt"], "there is no file nowhere.txt"),
        "no weights": (["--weights", str(tmp_path)], "/config.json"),
        "number": (["--steps", "-1"], "'-1' is not a whole number from 1"),
        "infinite": (["--clip", "inf"], "'inf' is not a number from 0"),
        "length": (["--length", "1"], "a sequence needs at least 2 tokens"),
    }


@pytest.mark.parametrize("case", [
    "policy", "batch", "mesh", "target", "encoding", "short", "tokenizer", "processes", "no file",
    "no weights", "number", "infinite", "length",
])  # fmt: skip
def test_mistakes_get_one_line(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv, words = bad(tmp_path)[case]
    try:
        code = train.main(argv)
    except SystemExit as stopped:  # argparse's own way
        code = stopped.code
    err = capfd.readouterr().err
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(("train: ", "python -m examples.gemma4.train: error:"))


def test_another_model_does_not_overwrite_a_run(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--size", "e2b", "--out", str(finished)]) == 2
    assert "holds a run of another model (vocab_size 384 → 262144" in capfd.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken(*args: Any, **kwargs: Any) -> State:
        state = init_state(*args, **kwargs)
        return eqx.tree_at(lambda s: s.model.norm.weight, state, replace_fn=lambda w: w * jnp.nan)

    monkeypatch.setattr(train, "init_state", broken)
    assert train.main([*run, "--out", str(tmp_path), "--save-every", "1"]) == 1
    assert "train: the loss is nan at step 1" in capfd.readouterr().err
    assert Checkpoints(tmp_path / "checkpoints").latest is None
