"""Checkpoints: what is in them comes back, wherever it goes; what is wrong with them is named."""

import json
import os
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from examples.gemma4 import weights
from examples.gemma4.config import Config, load_config

DATA = Path(__file__).parent / "data" / "gemma4"
E2B = DATA / "tiny_e2b"
MODELS = ("tiny_e2b", "tiny_e4b")
SOME = "model.layers.3.mlp.up_proj.weight"


def by_key(model):
    return dict(zip(weights.stored_names(model), jax.tree.leaves(model), strict=True))


def make(folder, tensors, config=E2B / "config.json", files=1):
    """A checkpoint of `tensors`, dealt out to that many files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.read_text())
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {}
    for i in range(files):
        part = dict(list(tensors.items())[i::files])
        save_file(part, folder / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture
def tensors():
    return load_file(E2B / "model.safetensors")


def same(model, tensors, prefix="model."):
    got = by_key(model)
    for key, x in got.items():
        want = tensors[key.replace("model.", prefix, 1)]
        assert np.asarray(x).dtype == want.dtype
        assert np.asarray(x).tobytes() == want.tobytes(), key
    return len(got)


@pytest.mark.parametrize("name", MODELS)
def test_loads_what_the_file_holds(name):
    stored = load_file(DATA / name / "model.safetensors")
    assert same(weights.load(DATA / name), stored) == len(stored)


@pytest.mark.parametrize("name", MODELS)
def test_both_spellings_of_the_config_are_one(name):
    hub = DATA / name / "config_hub_style.json"
    assert load_config(hub) == load_config(DATA / name)


@pytest.mark.parametrize("files", [1, 3])
def test_multimodal_checkpoints(tmp_path, tensors, files):
    """Another prefix, other towers, dead keys and values of readers, a config around the config."""
    prefix = "model.language_model."
    stored = {k.replace("model.", prefix, 1): x for k, x in tensors.items()}
    dead = {
        f"{prefix}layers.{i}.self_attn.{n}.weight": np.full((2, 3), np.nan, np.float32)
        for i in range(5, 9)
        for n in ("k_proj", "v_proj", "k_norm")
    }
    towers = {
        f"model.{t}.layers.0.weight": np.zeros(3, np.int8)
        for t in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    }
    folder = make(tmp_path / "c", stored | dead | towers, files=files)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": text, "eos_token_id": [1, 5]}))
    model = weights.load(folder)
    assert same(model, stored, prefix) == len(stored)
    assert model.config.eos_token_ids == (1, 5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_round_once(dtype):
    like = weights.abstract(load_config(E2B), dtype)
    got, want = by_key(weights.load(E2B, like)), by_key(weights.load(E2B))
    for key, x in got.items():
        assert x.dtype == dtype
        assert (np.asarray(x) == np.asarray(want[key]).astype(dtype)).all()


def test_reads_each_devices_part_into_place(monkeypatch):
    mesh = jax.make_mesh((2, 4), ("a", "b"))

    def place(x):
        fits = [n if x.shape[i] % mesh.shape[n] == 0 else None for i, n in ((0, "a"), (-1, "b"))]
        spec = PartitionSpec(*fits[: len(x.shape)])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    like = jax.tree.map(place, weights.abstract(load_config(E2B)))
    made = []
    place_parts = jax.make_array_from_callback

    def watch(shape, sharding, part):
        return place_parts(shape, sharding, lambda index: made.append(part(index)) or made[-1])

    monkeypatch.setattr(jax, "make_array_from_callback", watch)
    model = weights.load(E2B, like)
    same(model, load_file(E2B / "model.safetensors"))
    for x, wanted in zip(jax.tree.leaves(model), jax.tree.leaves(like), strict=True):
        assert x.sharding == wanted.sharding
    read = {x.shape for x in made}
    assert (97, 72) not in read  # of this table each device has a quarter
    assert (97, 18) in read


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shard_bytes", [2**31, 60_000])
def test_saves_what_it_loads(tmp_path, dtype, shard_bytes):
    model = weights.load(E2B)
    weights.save(model, tmp_path / "out", dtype=dtype, shard_bytes=shard_bytes)
    again = weights.load(tmp_path / "out")
    assert again.config == model.config
    for key, x in by_key(again).items():
        want = by_key(model)[key]
        assert x.dtype == (dtype or want.dtype)
        assert np.asarray(x).tobytes() == np.asarray(want).astype(x.dtype).tobytes()
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 2**31)
    assert not list(tmp_path.glob("*.part"))
    for file in files:
        small = file.stat().st_size < shard_bytes + 20_000
        assert small or len(load_file(file)) == 1


def test_saves_sharded_models(tmp_path):
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec())
    model = weights.load(E2B)
    spread = jax.tree.map(lambda x: jax.device_put(x, sharding), model)
    weights.save(spread, tmp_path / "out")
    same(weights.load(tmp_path / "out"), load_file(E2B / "model.safetensors"))


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        weights.save(weights.load(E2B), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


# -- What is wrong is named --------------------------------------------------------------------------


def drop(tensors):
    del tensors[SOME]


def add(tensors):
    tensors["model.layers.3.mlp.bias"] = np.zeros(3, np.float32)


def reshape(tensors):
    tensors[SOME] = tensors[SOME].T.copy()


def integers(tensors):
    tensors[SOME] = tensors[SOME].astype(np.int8)


def infinite(tensors):
    tensors[SOME][4, 2] = np.inf


def other_prefix(tensors):
    tensors["model.language_model.norm.weight"] = tensors.pop("model.norm.weight")


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, rf"{SOME}: expected \[44, 32\], found nothing"),
        (add, r"model\.layers\.3\.mlp\.bias: expected nothing, found F32 \[3\]"),
        (reshape, rf"{SOME}: expected \[44, 32\], found \[32, 44\]"),
        (integers, rf"{SOME}: expected F32, BF16, F16, found I8"),
        (infinite, rf"{SOME}: expected finite numbers in float32, found inf at \[4, 2\]"),
        (other_prefix, r"model\.language_model\.embed_tokens\.weight: expected .*found nothing"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, spoil, message, files):
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        weights.load(make(tmp_path / "c", tensors, files=files))


def test_all_bad_tensors_are_in_one_error(tmp_path, tensors):
    drop(tensors)
    add(tensors)
    with pytest.raises(ValueError, match="2 tensors") as error:
        weights.load(make(tmp_path / "c", tensors))
    assert SOME in str(error.value)
    assert "mlp.bias" in str(error.value)


def rewrite(path, change):
    """The file with another header; `change` gets it and the data as they are."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    new = change(header) or header
    text = new if isinstance(new, bytes) else json.dumps(new).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(**fields):
    return lambda header: header[SOME].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry(shape=[44, 33]), rf"{SOME}: expected 5808 bytes for F32 \[44, 33\], found"),
        (entry(shape=[2**62, 2**62]), rf"{SOME}: expected .* bytes for F32"),
        (entry(shape=[-44, -32]), rf"{SOME}: expected dtype, shape and data_offsets, found"),
        (entry(shape="44"), rf"{SOME}: expected dtype, shape and data_offsets, found"),
        (entry(dtype="F64"), rf"{SOME}: expected 11264 bytes for F64 \[44, 32\], found"),
        (entry(dtype="pickle"), rf"{SOME}: expected dtype, shape and data_offsets, found"),
        (entry(data_offsets=[0, 5632]), r"expected to start at byte|expected .* bytes of data"),
        (entry(data_offsets=[-5632, 0]), rf"{SOME}: expected dtype, shape and data_offsets"),
        (entry(data_offsets=[10**9, 10**9 + 5632]), rf"{SOME}: expected bytes 1000000000 to"),
        (lambda h: h.update({SOME: None}), rf"{SOME}: expected dtype, shape and data_offsets"),
        (lambda h: b"[1, 2]", "expected a JSON object as header"),
        (lambda h: b"{" * 20_000, "expected a header in JSON"),
        (lambda h: b"[" * 200_000, "expected a header in JSON"),
        (lambda h: b"\xff\xfe{}", "expected a header in JSON"),
        (lambda h: json.dumps(h).encode()[:-100], "expected a header in JSON"),
        (lambda h: b"{}", "expected 0 bytes of data, found"),
    ],
)
def test_corrupted_headers(tmp_path, tensors, change, message):
    folder = make(tmp_path / "c", tensors)
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        weights.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 300, 20_000, 200_000, -1])
def test_cut_off_files(tmp_path, tensors, keep):
    path = make(tmp_path / "c", tensors) / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    message = "expected a header of" if keep in (0, 5, 8, 300) else r"model\.[\w.]+: expected bytes"
    with pytest.raises(ValueError, match=message):
        weights.load(path.parent)


def test_too_long_files(tmp_path, tensors):
    path = make(tmp_path / "c", tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ValueError, match="bytes of data, found"):
        weights.load(path.parent)


def test_a_header_that_claims_to_be_huge(tmp_path, tensors):
    path = make(tmp_path / "c", tensors) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])
    with pytest.raises(ValueError, match="expected a header of 9223372036854775808 bytes"):
        weights.load(path.parent)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("nonsense", "weight_map"),
        ("{}", "weight_map"),
        ("[1]", "weight_map"),
        ("[" * 200_000, "weight_map"),
        ('{"weight_map": 3}', "weight_map must be a JSON object"),
        ('{"weight_map": {"a": "../part-0.safetensors"}}', "a: expected the name of a"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "a: expected the name of a"),
        ('{"weight_map": {"a": "part-0.bin"}}', "a: expected the name of a"),
        ('{"weight_map": {"a": 3}}', "a: expected the name of a"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "a: expected the name of a"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "a: expected in gone.safetensors.*no such"),
        ('{"weight_map": {"a": "part-0.safetensors"}}', "found in part-0.safetensors, but"),
    ],
)
def test_bad_index_files(tmp_path, tensors, index, message):
    folder = make(tmp_path / "c", tensors, files=2)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        weights.load(folder)


def test_an_index_that_names_what_is_not_there(tmp_path, tensors):
    folder = make(tmp_path / "c", tensors, files=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more"] = "part-1.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.more: expected in part-1.safetensors"):
        weights.load(folder)


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text((E2B / "config.json").read_text())
    with pytest.raises(ValueError, match="has neither"):
        weights.load(tmp_path)


def test_another_model_than_asked_for():
    like = weights.abstract(load_config(DATA / "tiny_e4b"))
    with pytest.raises(ValueError, match="vocab_size: expected 83, found 89"):
        weights.load(E2B, like)


def test_flipped_bytes_never_do_harm(tmp_path, tensors):
    """A byte changed anywhere: an error that says so, or a model of finite numbers."""
    path = make(tmp_path / "c", tensors) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (header,) = struct.unpack("<Q", raw[:8])
    rng = np.random.default_rng(0)
    errors = 0
    for i in range(45):
        at = int(rng.integers(8 + header if i % 3 else len(raw)))
        old, raw[at] = raw[at], int(rng.integers(256))
        path.write_bytes(raw)
        try:
            model = weights.load(path.parent)
        except ValueError:
            errors += 1
        else:
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(model))
        raw[at] = old
    assert errors > 15


_TWO_PROCESSES = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from examples.gemma4 import weights
from examples.gemma4.config import load_config
mesh = jax.make_mesh((4,), ("a",))

def place(x):
    spec = jax.P("a") if x.shape[0] % 4 == 0 else jax.P()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

like = jax.tree.map(place, weights.abstract(load_config(sys.argv[3])))
model = weights.load(sys.argv[3], like)
assert any(not x.is_fully_addressable for x in jax.tree.leaves(model))
weights.save(model, sys.argv[4], shard_bytes=100_000)
"""


@pytest.mark.slow
def test_two_processes_load_and_save_together(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": os.environ["PATH"]}
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _TWO_PROCESSES,
                address,
                str(i),
                str(E2B),
                str(tmp_path / "out"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors[-3000:]
    same(weights.load(tmp_path / "out"), load_file(E2B / "model.safetensors"))


# -- Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters", "stored", "table"),
    [
        (Config.e2b(), 4_629_000_000, 540, (262_144, 8960)),
        (Config.e4b(), 7_463_000_000, 665, (262_144, 10_752)),
    ],
)
def test_full_size(config, parameters, stored, table):
    """The shapes of GEMMA4_SMALL.md, without the memory."""
    shapes = {k: x.shape for k, x in by_key(weights.abstract(config)).items()}
    assert round(sum(int(np.prod(s)) for s in shapes.values()), -6) == parameters
    assert len(shapes) == stored
    d, L = config.hidden_size, config.num_layers
    assert shapes.pop("model.embed_tokens.weight") == (262_144, d)
    assert shapes.pop("model.embed_tokens_per_layer.weight") == table
    assert shapes.pop("model.per_layer_model_projection.weight") == (L * 256, d)
    assert shapes.pop("model.per_layer_projection_norm.weight") == (256,)
    assert shapes.pop("model.norm.weight") == (d,)
    first_shared, group = (15, 5) if L == 35 else (24, 6)
    heads = 1 if L == 35 else 2
    for i in range(L):
        D = 512 if i % group == group - 1 else 256
        wide = 12_288 if L == 35 and i >= first_shared else config.intermediate_size
        layer = {
            **dict.fromkeys(
                (
                    "input_layernorm.weight",
                    "post_attention_layernorm.weight",
                    "pre_feedforward_layernorm.weight",
                    "post_feedforward_layernorm.weight",
                    "post_per_layer_input_norm.weight",
                ),
                (d,),
            ),
            "layer_scalar": (1,),
            "per_layer_input_gate.weight": (256, d),
            "per_layer_projection.weight": (d, 256),
            "self_attn.q_proj.weight": (8 * D, d),
            "self_attn.o_proj.weight": (d, 8 * D),
            "self_attn.q_norm.weight": (D,),
            "mlp.gate_proj.weight": (wide, d),
            "mlp.up_proj.weight": (wide, d),
            "mlp.down_proj.weight": (d, wide),
        }
        if i < first_shared:
            layer["self_attn.k_proj.weight"] = layer["self_attn.v_proj.weight"] = (heads * D, d)
            layer["self_attn.k_norm.weight"] = (D,)
        for name, shape in layer.items():
            assert shapes.pop(f"model.layers.{i}.{name}") == shape, name
    assert not shapes
    assert config.donors == (
        {"sliding_attention": 13, "full_attention": 14}
        if L == 35
        else {"sliding_attention": 22, "full_attention": 23}
    )


_PEAK = """
import resource, sys, jax
from examples.gemma4 import weights
jax.numpy.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = weights.load(sys.argv[1])
size = sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(model)))
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_SELF"), reason="needs getrusage")
def test_memory_while_loading(tmp_path, tensors):
    """Beside the model there is one tensor at most, and what the operating system maps of the file."""
    config = json.loads((E2B / "config.json").read_text())
    config |= {"intermediate_size": 44 * 2**9}
    for key, x in tensors.items():
        if "mlp.down" in key:
            tensors[key] = np.tile(x, (1, 2**9))
        elif ".mlp." in key:
            tensors[key] = np.tile(x, (2**9, 1))
    folder = make(tmp_path / "c", tensors, files=9)
    (folder / "config.json").write_text(json.dumps(config))
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(folder)],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert run.returncode == 0, run.stderr
    size, peak = map(int, run.stdout.split())
    assert size > 100e6
    assert peak < 1.5 * size
