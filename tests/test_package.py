"""The package as it is installed and imported."""

import importlib.metadata
import subprocess
import sys
from importlib import resources

import remat_scan

LIGHT = """
import sys
import jax, equinox, jaxtyping
before = set(sys.modules)
import remat_scan
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
print(jax._src.xla_bridge._backends)
"""


def test_importing_brings_in_nothing_heavy_and_starts_no_backend():
    run = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    modules, backends = run.stdout.splitlines()
    third_party = set(modules.split()) - set(sys.stdlib_module_names) - {"remat_scan"}
    assert third_party <= {"jax", "jaxlib", "equinox", "jaxtyping"}
    assert backends == "{}"


def test_every_public_name_has_a_docstring_and_a_type():
    public = [name for name in vars(remat_scan) if not name.startswith("_")]
    functions = [n for n in public if callable(getattr(remat_scan, n))]
    assert {"checkpointed_layer", "isolated_scan", "memory_report", "Policy"} <= set(functions)
    for name in functions:
        assert getattr(remat_scan, name).__doc__, name
    assert resources.files(remat_scan).joinpath("py.typed").is_file()


def test_version():
    assert remat_scan.__version__.count(".") == 2
    try:
        installed = importlib.metadata.version("remat-scan")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout
    assert installed == remat_scan.__version__
