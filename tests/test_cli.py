"""The command line, as a user meets it."""

import json
import subprocess
import sys
import textwrap

import pytest

from remat_scan._cli import main

PROGRAM = """
import jax, jax.numpy as jnp

def good():
    return jax.jit(lambda x: x @ x), jax.ShapeDtypeStruct((64, 64), jnp.float32)

def raises():
    raise RuntimeError("no data here")

def wrong():
    return 3

def bad_shapes():
    return (lambda a, b: a @ b), jnp.ones((2, 3)), jnp.ones((2, 3))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "program_of_user.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("program_of_user", None)


def test_report_as_json(here, capsys):
    assert main(["report", "program_of_user:good", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["cpu"]
    assert report["arguments"] == 64 * 64 * 4
    assert report["flops"] == 2 * 64**3


def test_report_as_tables(here, capsys):
    assert main(["report", "program_of_user:good", "--target", "cpu", "--target", "cpu:2"]) == 0
    out = capsys.readouterr().out
    assert "cpu:2" in out
    assert (
        sum(line.split()[:1] == ["temporaries"] for line in out.splitlines()) == 3
    )  # and the comparison


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "program_of_user"], "expected module:fn"),
        (["report", "no_such_module:good"], "no module 'no_such_module'"),
        (["report", "program_of_user:nothing"], "has no 'nothing'; it has good"),
        (["report", "program_of_user:raises"], "no data here"),
        (["report", "program_of_user:wrong"], "has to return (step, *args), got int"),
        (["report", "program_of_user:bad_shapes"], "program_of_user.py:"),
        (["report", "program_of_user:good", "--target", "h10"], "Did you mean 'h100'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(here, capsys, arguments, words):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_targets(capsys):
    assert main(["targets", "--json"]) == 0
    rows = {r["target"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["tpu7x:2x2x1"]["devices"] == 8
    assert main(["targets"]) == 0
    assert "h200:8" in capsys.readouterr().out


def test_doctor_says_what_works(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"]["cpu"] == "works"
    assert {"jax", "python", "remat_scan", "system", "equinox"} <= set(found["versions"])


def test_as_a_module():
    run = [sys.executable, "-m", "remat_scan"]
    assert "doctor" in subprocess.run([*run, "--help"], capture_output=True, text=True).stdout
    wrong = subprocess.run([*run, "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
