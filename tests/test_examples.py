"""Every script under `examples/` runs; each checks itself against the plain loop."""

import importlib.util
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "__init__")
NEEDS = {
    "equinox_transformer": ["optax"],
    "flax_linen": ["flax"],
    "flax_nnx": ["flax"],
    "haiku_model": ["haiku"],
    "sharded_training": ["optax"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(s, marks=pytest.mark.aot) if s == "laptop_report" else s for s in SCRIPTS],
)
def test_example(name, capsys):
    for package in NEEDS.get(name, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example shows what it found"
