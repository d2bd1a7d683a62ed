"""The logit checker: right numbers, a verdict as its exit code, and a line for bad input."""

import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("rich")

import jax
import numpy as np
from gemma4_small import small
from safetensors.numpy import load_file, save_file

from examples.gemma4 import weights
from examples.gemma4.check_logits import main
from examples.gemma4.compare import compare_logits, gradients, intermediates
from examples.gemma4.reference import Reference, batches

E2B = Path(__file__).parent / "data" / "gemma4" / "tiny_e2b"
REFERENCE = E2B / "reference.npz"


@pytest.fixture(scope="module")
def ref():
    return dict(np.load(REFERENCE))


def written(folder, arrays):
    np.savez(folder / "ref.npz", **arrays)
    return str(folder / "ref.npz")


def only(ref, *names):
    return {n: ref[n] for n in ("input_ids", "logits", *names)}


def as_json(capsys, *argv):
    code = main([*map(str, argv), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_as_a_person_runs_it(everything):
    """In a process of its own, with limits as tight as the project asks of the model."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "examples.gemma4.check_logits", str(E2B)),
            *("--reference", str(REFERENCE), "--max-kl-div", "1e-8", "--max-abs-err", "1e-4"),
            *(("--intermediates", "--gradients") if everything else ()),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    shown = ["padded", "left", "decode", "top 10", "rank in model", "PASS"]
    for text in shown + ["of 30", "of 147"] * everything:
        assert text in run.stdout


def test_json_holds_what_the_tables_show(tmp_path, ref, capsys):
    code, result = as_json(capsys, E2B, "--reference", written(tmp_path, only(ref)))
    assert code == 0
    assert result["verdict"] == "pass"
    assert result["failures"] == []
    (batch,) = result["logits"]
    assert batch["tokens"] == 34
    assert 0 <= batch["mean_kl"] <= 1e-8
    assert batch["max_abs_err"] < 1e-4
    assert batch["top_1"] == batch["overlap"] == batch["rank_agreement"] == 1
    assert [c["rank"] for c in batch["candidates"]] == list(range(1, 11))
    row, column = batch["worst"]
    best = np.argsort(-ref["logits"][row, column])[:10]
    assert [c["token"] for c in batch["candidates"]] == best.tolist()


def test_a_wrong_logit_fails(tmp_path, ref, capsys):
    logits = ref["logits"].copy()
    logits[1, 5, 7] += 3
    reference = written(tmp_path, only(ref) | {"logits": logits})
    code, result = as_json(capsys, E2B, "--reference", reference, "--max-abs-err", "0.1")
    assert code == 1
    assert result["verdict"] == "fail"
    assert result["logits"][0]["worst"] == [1, 5]
    assert result["logits"][0]["max_abs_err"] == pytest.approx(3, abs=1e-3)
    assert len(result["failures"]) == 1
    assert "the largest error of a logit is 3" in result["failures"][0]
    assert main([str(E2B), "--reference", reference]) == 1  # by the default limit of the divergence
    assert "FAIL batch: the largest KL divergence" in capsys.readouterr().out


def test_a_logit_that_is_no_number_fails(tmp_path, ref, capsys):
    logits = ref["logits"].copy()
    logits[0, 3, 0] = np.nan
    reference = written(tmp_path, only(ref) | {"logits": logits})
    code, result = as_json(capsys, E2B, "--reference", reference, "--max-kl-div", "1e9")
    assert code == 1
    assert result["logits"][0]["max_abs_err"] is None
    assert result["logits"][0]["worst"] == [0, 3]


def test_wrong_intermediates_and_gradients_fail(tmp_path, capsys):
    model, ids = small()
    weights.save(model, tmp_path / "small")
    inner = jax.jit(intermediates)(model, ids)
    loss, grads = jax.jit(gradients)(model, ids)
    assert {"attn_out.3", "mlp_out.2", "layer_out.0", "ple"} < set(inner)
    arrays = {"input_ids": ids, "logits": model.head(inner["final_norm_out"]), "loss": loss}
    arrays |= inner | {f"grad.{k}": x for k, x in grads.items()}
    right = written(tmp_path, arrays)
    both = ("--intermediates", "--gradients")
    assert main([str(tmp_path / "small"), "--reference", right, *both]) == 0
    arrays["attn_out.3"] *= 1.001
    arrays["grad.model.norm.weight"] *= 0.999
    arrays["grad.model.layers.3.layer_scalar"] += 1e-7  # noise
    capsys.readouterr()
    code, result = as_json(
        capsys, tmp_path / "small", "--reference", written(tmp_path, arrays), *both
    )
    assert code == 1
    assert [f.split(":")[0] for f in result["failures"]] == ["attn_out.3", "grad.model.norm.weight"]
    assert len(result["intermediates"]) == len(inner) == 3 + 3 * 4
    assert len(result["gradients"]) == 1 + len(grads)


def test_other_weights_fail(tmp_path, ref, capsys):
    tensors = load_file(E2B / "model.safetensors")
    tensors["model.layers.2.self_attn.q_norm.weight"] *= 1.1
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(E2B / "config.json", tmp_path)
    limits = ("--max-kl-div", "1e-8")
    assert main([str(tmp_path), "--reference", written(tmp_path, only(ref)), *limits]) == 1
    capsys.readouterr()


def test_numbers_by_hand():
    want = np.log(np.asarray([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]], np.float32))
    got = np.log(np.asarray([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]], np.float32))
    valid = np.ones((1, 2), bool)
    result = compare_logits("x", lambda rows, columns: got[columns], want, valid)
    kl = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert result.max_kl == pytest.approx(kl, rel=1e-5)
    assert result.mean_kl == pytest.approx(kl / 2, rel=1e-5)
    assert result.max_abs_err == pytest.approx(np.log(2), rel=1e-5)
    assert result.top_1 == 0.5
    assert result.overlap == 1
    assert result.rank_agreement == pytest.approx((1 / 3 + 1) / 2)
    assert [c.own_rank for c in result.candidates] == [2, 1, 2]
    half = compare_logits("x", lambda r, c: got[c], want, np.asarray([[False, True]]))
    assert half.tokens == 1
    assert half.max_kl == pytest.approx(0, abs=1e-12)


# -- Bad input -----------------------------------------------------------------------------------------


def npy(header):
    """An array file with a header of one's own and 16 bytes of data."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 16


def archive(folder, **members):
    with zipfile.ZipFile(folder / "ref.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name + ".npy", content)
    return str(folder / "ref.npz")


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def fails(capsys, message, *argv):
    assert main([*map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("check_logits: ")
    assert message in err
    assert "Traceback" not in err


def test_missing_files(tmp_path, capsys):
    fails(capsys, "No such file", tmp_path, "--reference", REFERENCE)
    fails(capsys, "No such file", E2B, "--reference", tmp_path / "none.npz")
    fails(capsys, "directory", E2B, "--reference", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "has no 'input_ids'"),
        ({"logits": None}, "has no 'logits'"),
        ({"logits": np.zeros((2, 17, 88), np.float32)}, "logits: expected float [2, 17, 89]"),
        ({"logits": np.zeros((2, 17, 89), np.int32)}, "logits: expected float [2, 17, 89]"),
        ({"input_ids": np.full((2, 17), 89)}, "expected ids below 89"),
        ({"input_ids": np.full((2, 17), -1)}, "expected ids below 89"),
        ({"input_ids": np.zeros((2, 17))}, "input_ids: expected int [any, any]"),
        ({"input_ids": np.zeros((0, 17), int)}, "input_ids: expected int [any, any]"),
        ({"attention_mask": np.zeros((2, 17), int)}, "expected a valid token, found none"),
        ({"attention_mask": np.zeros((2, 16), int)}, "attention_mask: expected int or bool"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, ref, capsys, change, message):
    arrays = {k: x for k, x in (only(ref) | change).items() if x is not None}
    fails(capsys, message, E2B, "--reference", written(tmp_path, arrays))


def test_nothing_to_check(tmp_path, ref, capsys):
    reference = written(tmp_path, only(ref))
    fails(capsys, "no intermediates", E2B, "--reference", reference, "--intermediates")
    fails(capsys, "no gradients", E2B, "--reference", reference, "--gradients")


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(HUGE), "expected 4000000000000 bytes"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}"), "input_ids: expected int"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -2)}"), ""),
        (npy("__import__('os').abort()"), "not a NumPy array"),
        (b"\x80\x04cos\nabort\n(tR.", "not a NumPy array"),
        (b"", "not a NumPy array"),
        (b"\0" * 10**8, "not a NumPy array"),
    ],
)
def test_hostile_arrays(tmp_path, capsys, content, message):
    reference = archive(tmp_path, input_ids=content, logits=saved(np.zeros(3)))
    assert main([str(E2B), "--reference", reference]) == 2
    err = capsys.readouterr().err
    assert any(part in err for part in message.split("|"))


def test_pickles_are_not_run(tmp_path, ref, capsys):
    arrays = only(ref) | {"logits": np.asarray([[[print]]], dtype=object)}
    fails(capsys, "logits: expected", E2B, "--reference", written(tmp_path, arrays))


def test_broken_archives(tmp_path, capsys):
    path = tmp_path / "ref.npz"
    raw = REFERENCE.read_bytes()
    for content in (b"", b"PK\x03\x04", raw[: len(raw) // 2], b"\0" * 500):
        path.write_bytes(content)
        fails(capsys, "expected an .npz file", E2B, "--reference", path)
    for at in (0, 32, 70, 150):  # the first array's own header, its name, its checksummed bytes
        damaged = bytearray(raw)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        fails(capsys, "input_ids", E2B, "--reference", path)


@pytest.mark.slow
def test_damage_anywhere_is_refused_or_harmless(tmp_path):
    model, raw = weights.load(E2B), REFERENCE.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(raw)
        for at in rng.integers(0, rng.choice([400, len(raw)]), rng.integers(1, 6)):
            damaged[int(at)] = int(rng.integers(256))
        (tmp_path / "ref.npz").write_bytes(damaged)
        try:
            for batch in batches(Reference(tmp_path / "ref.npz"), model.config):
                assert batch.logits.shape[-1] == 89
        except ValueError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "argv", [[], [str(E2B)], ["--max-kl-div", "nan"], ["--max-abs-err", "-1"], ["--kernel", "x"]]
)
def test_bad_command_lines(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(E2B), "--reference", str(REFERENCE), *argv] if len(argv) == 2 else argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err
