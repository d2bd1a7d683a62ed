"""What users import into their own tests, used as they use it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import mlp

from remat_scan import checkpointed_layer, memory_report
from remat_scan.testing import (
    MemorySnapshots,
    assert_isolated,
    assert_peak_below,
    describe_difference,
)


def square(x):
    return jnp.sin(x) @ jnp.cos(x)


SMALL, LARGE = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (64, 128))


def test_assert_peak_below():
    needs = memory_report(square, SMALL).needs
    assert needs >= 2 * 64 * 64 * 4
    assert assert_peak_below(square, SMALL, bytes=needs + 1).needs == needs
    with pytest.raises(AssertionError, match=r"needs .* is not below .* KiB:\ncpu") as caught:
        assert_peak_below(square, SMALL, bytes=needs)
    assert "Alive at the peak" in str(caught.value)


def test_a_donated_argument_counts_once():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    report = assert_peak_below(step, SMALL, bytes=64 * 64 * 4 * 1.5)
    assert report.aliased == 64 * 64 * 4


def test_assert_peak_below_passes_options_on():
    with pytest.raises(AssertionError, match=r"^needs"):
        assert_peak_below(lambda x, *, n: jnp.zeros(n) + x, 1.0, n=1000, target="cpu:2", bytes=4000)


def test_assert_isolated():
    def loss(layer, w, x):
        return jnp.sum(layer(w, layer(w, x)) ** 2)

    w = {"wi": jnp.ones((8, 16)), "wo": jnp.ones((16, 8))}
    layer = checkpointed_layer(mlp)
    verdict = assert_isolated(
        jax.grad(lambda w, x: loss(layer, w, x)), w, jnp.ones((4, 8)), layers=2
    )
    assert len(verdict.layers) == 2
    with pytest.raises(AssertionError, match="no wrapped layer was found"):
        assert_isolated(jax.grad(lambda w, x: loss(mlp, w, x)), w, jnp.ones((4, 8)))


# -- Snapshots -------------------------------------------------------------------------------------


def test_snapshots_in_one_process(tmp_path):
    write = MemorySnapshots(tmp_path, "test_it[a/b]", update=True)
    read = MemorySnapshots(tmp_path, "test_it[a/b]", update=False)
    with pytest.raises(AssertionError, match=r"no snapshot .* --memory-snapshot-update"):
        read(square, SMALL)
    write(square, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["test_it_a_b_-cpu.json"]
    read(square, SMALL)
    with pytest.raises(AssertionError, match="Memory has moved by more than 2 %") as caught:
        read(square, LARGE)
    message = str(caught.value)
    assert "arguments        16.00 KiB →      64.00 KiB  +300.0 %" in message
    assert "alive at the peak" in message
    read(square, LARGE, tolerance=10)
    with pytest.raises(AssertionError, match="no snapshot"):
        read(square, SMALL, name="other")
    next(tmp_path.iterdir()).write_text('{"target": "cpu"}')
    with pytest.raises(AssertionError, match="is no snapshot"):
        read(square, SMALL)


def test_a_figure_within_the_tolerance_passes_and_versions_are_shown():
    import dataclasses

    before = memory_report(square, SMALL)
    near = dataclasses.replace(before, needs=int(before.needs * 1.01))
    assert describe_difference(before, near, 0.02) == ""
    far = dataclasses.replace(before, needs=before.needs * 2, versions={"jax": "99"}, host=5)
    text = describe_difference(before, far, 0.02)
    assert "needs" in text
    assert "+100.0 %" in text
    assert "→             99" in text
    assert "host" in text  # from not known to known is a difference


TESTS = """
import jax.numpy as jnp

SIZE = 64

def test_memory(memory_snapshot):
    x = jnp.ones((SIZE, SIZE), jnp.float32)
    memory_snapshot(lambda x: x @ x, x, target="cpu")
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "pytest_remat_scan", "-q", "-c", os.devnull]
    return subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )


def test_the_fixture_in_a_project_of_its_own(tmp_path):
    file = tmp_path / "test_user.py"
    file.write_text(textwrap.dedent(TESTS))
    missing = run_pytest(tmp_path)
    assert missing.returncode == 1
    assert "--memory-snapshot-update" in missing.stdout
    assert run_pytest(tmp_path, "--memory-snapshot-update").returncode == 0
    stored = tmp_path / "memory_snapshots" / "test_user" / "test_memory-cpu.json"
    assert '"arguments": 16384' in stored.read_text()
    again = run_pytest(tmp_path)
    assert again.returncode == 0, again.stdout
    file.write_text(textwrap.dedent(TESTS).replace("SIZE = 64", "SIZE = 96"))
    moved = run_pytest(tmp_path)
    assert moved.returncode == 1
    assert "+125.0 %" in moved.stdout


def test_the_plugin_imports_no_jax():
    """Plugins load before a project's conftest.py, which may set what jax reads at import."""
    code = "import sys, pytest_remat_scan; print('jax' in sys.modules)"
    folder = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert run.stdout.strip() == "False", run.stderr
