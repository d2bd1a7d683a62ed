"""Some cases of the fuzzer, and what its long runs found: each kind of finding has its test here."""

import contextlib
import json
import os
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

for _needed in ("safetensors", "tokenizers", "orbax.checkpoint"):
    pytest.importorskip(_needed)

import fuzz_weights
import jax
import jax.numpy as jnp

from examples.gemma4 import data, generate, weights
from examples.gemma4.checkpoints import Checkpoints
from examples.gemma4.config import load_config
from examples.gemma4.quoting import shown
from examples.gemma4.reference import Reference

E2B = Path(__file__).parent / "data" / "gemma4" / "tiny_e2b"
CLEAR_SCREEN = "\x1b[2J"


@pytest.mark.parametrize("name", fuzz_weights.TARGETS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    """The errors alone; memory and what the interpreter does are watched by the long runs."""
    target = fuzz_weights.TARGETS[name]
    valid = tmp_path / "valid"
    valid.mkdir()
    target.make(valid)
    target.read(valid)
    refused = []
    for number in range(12):
        folder = tmp_path / str(number)
        changed = fuzz_weights.spoil(target, number, valid, folder)
        try:
            target.read(folder)
        except Exception as error:
            refused.append((number, changed, fuzz_weights.judge(error, folder)))
    assert refused
    assert not [case for case in refused if case[-1]]


def test_the_judge_finds_fault(tmp_path):
    """An error that would be no help, and one that would."""
    (tmp_path / "config.json").write_text("{}")
    judge = fuzz_weights.judge
    assert judge(KeyError(f"{tmp_path}"), tmp_path) == "a KeyError"
    assert judge(ValueError("wrong"), tmp_path) == "a message that names no file"
    assert "control" in str(judge(ValueError(f"{tmp_path}: {CLEAR_SCREEN}"), tmp_path))
    assert "long" in str(judge(ValueError(f"{tmp_path}" * 10_000), tmp_path))
    assert judge(ValueError("config.json: empty"), tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["run a program", "take memory", "write", "read elsewhere"])
def test_the_watch_sees(what, tmp_path):
    """A reader that does what no reader may is found."""
    valid = tmp_path / "valid"
    valid.mkdir()
    (valid / "x").write_text("1")

    def read(folder):
        if what == "run a program":
            os.system("true")
        elif what == "take memory":
            bytearray(fuzz_weights.SLACK * 2)
        elif what == "write":
            (folder / "new").write_text("1")
        else:
            Path("/etc/passwd").read_text()

    target = fuzz_weights.Target("bad", lambda folder: None, read)
    watch = fuzz_weights.Watch()
    number = next(n for n in range(99) if _kept(target, n, valid, tmp_path / str(n)))
    case = fuzz_weights.run_case(target, number, valid, tmp_path / "work", watch)
    said = {"run a program": "os.system", "take memory": "bytes taken", "write": "new"}
    assert said.get(what, "passwd") in str(case["finding"])


def _kept(target, number, valid, folder):
    """Whether the mutation leaves a file there."""
    return "x: mutate" in fuzz_weights.spoil(target, number, valid, folder)


# -- What was found ----------------------------------------------------------------------------------


def test_shown_is_one_line_of_plain_text():
    assert shown("model.norm.weight") == "model.norm.weight"
    assert shown("naïve 日本") == "naïve 日本"
    assert shown(f"a{CLEAR_SCREEN}\n\ud800\u202eb") == "a\\x1b[2J\\n\\ud800\\u202eb"
    assert shown("x" * 1000, 20) == "x" * 20 + "…"


def test_tensors_with_names_that_would_write_over_the_terminal(tmp_path):
    shutil.copy(E2B / "config.json", tmp_path)
    index = {"weight_map": {CLEAR_SCREEN + "x" * 10**6: "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"\\x1b\[2Jxxx") as error:
        weights.load(tmp_path)
    assert len(str(error.value)) < 1000
    assert CLEAR_SCREEN not in str(error.value)


def test_an_index_that_is_no_text(tmp_path):
    shutil.copy(E2B / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(b"\xff" * 10**6)
    with pytest.raises(ValueError, match="weight_map: 'utf-8' codec") as error:
        weights.load(tmp_path)
    assert len(str(error.value)) < 1000


def test_a_folder_in_a_file_s_place(tmp_path):
    shutil.copy(E2B / "config.json", tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors: "):
        weights.load(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"[" * 200_000, b""])
def test_tokenizers_that_are_none(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a Hugging Face tokenizer"):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected a JSON object, found"),
        ("{", "generation_config.json: Expecting"),
        ("[" * 200_000, "generation_config.json: "),
        ('{"eos_token_id": "1"}', "eos_token_id: expected ids below 89.*found '1'"),
        ('{"eos_token_id": [1, true]}', "eos_token_id: .* found True"),
        ('{"eos_token_id": {"a": 1}}', "eos_token_id: expected ids"),
        ('{"eos_token_id": 89}', "eos_token_id: expected ids below 89.*found 89"),
        ('{"eos_token_id": -1}', "eos_token_id: .* found -1"),
        ('{"eos_token_id": [[1]]}', r"eos_token_id: .* found \[1\]"),
    ],
)
def test_generation_configs_that_are_none(tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        generate.stop_ids(tmp_path, load_config(E2B))


@pytest.mark.parametrize("content", ["{}", '{"eos_token_id": null}', '{"eos_token_id": []}'])
def test_generation_configs_that_add_nothing(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    config = load_config(E2B)
    assert generate.stop_ids(tmp_path, config) == config.eos_token_ids


def test_a_training_checkpoint_that_is_damaged(tmp_path):
    items = {"model": {"w": jnp.ones((3, 4))}}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, items, {})
    checkpoints.close()
    for path in (tmp_path / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:20])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), items)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"/1: expected a checkpoint of model"):
        checkpoints.restore(wanted)
    checkpoints.close()


def test_a_reference_whose_index_leads_out_of_the_file(tmp_path):
    raw = bytearray((E2B / "reference.npz").read_bytes())
    start = raw.rindex(b"PK\x01\x02")  # the last entry of the zip's index
    name = raw[start + 46 :][: raw[start + 28]].decode().removesuffix(".npy")
    raw[start + 42 : start + 46] = b"\xff\xff\xff\x7f"  # where its member is
    (tmp_path / "reference.npz").write_bytes(raw)
    reference = Reference(tmp_path / "reference.npz")
    with pytest.raises(ValueError, match=rf"reference\.npz: {name}: not a NumPy array"):
        reference.shape(name)


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "final_logit_softcapping", "rope_theta", "vocab_size", "eos_token_id"]
)
def test_configs_with_integers_that_are_too_long(tmp_path, name, digits):
    text = json.loads((E2B / "config.json").read_text())
    wrong = text["rope_parameters"]["full_attention"] if name == "rope_theta" else text
    wrong[name] = "HERE"
    content = json.dumps(text).replace('"HERE"', "1" * digits)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        load_config(tmp_path)
    assert len(str(error.value)) < 1500


def test_a_training_checkpoint_whose_notes_have_no_end(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": {"w": jnp.ones(3)}}, {})
    checkpoints.close()
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("[" * 200_000)
    wanted = {"model": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}

    def restore():
        with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
            checkpoints.restore(wanted)

    with pytest.raises(ValueError, match=r"expected a checkpoint of .*: RecursionError"):
        restore()


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("tokenizer", 200069),  # the Rust library panics, with no Exception
        ("logit reference", 200019),  # Python's parser objects to a header, by errors of its own
        ("logit reference", 204287),  # ids beyond the vocabulary
    ],
)
def test_what_an_hour_found(target, number, tmp_path):
    target = fuzz_weights.TARGETS[target]
    valid, folder = tmp_path / "valid", tmp_path / "case"
    valid.mkdir()
    target.make(valid)
    fuzz_weights.spoil(target, number, valid, folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json|reference\.npz"):
        target.read(folder)


def test_a_header_that_makes_python_warn(tmp_path):
    """To show a warning about text that it parses, Python looks for a file of that name."""
    path = tmp_path / "reference.npz"
    header = rb"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), '\d': 0}"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("logits.npy", array)
    with pytest.warns(match="invalid escape"):
        compile(header, "<string>", "eval")  # what is to be seen
    with warnings.catch_warnings(record=True) as shown_to_the_user:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="logits: not a NumPy array"):
            Reference(path).shape("logits")
    assert not shown_to_the_user
