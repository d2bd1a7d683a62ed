"""Every job of this project, each in a clean environment that nox makes: ``nox -l`` lists them."""

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "types", "demo"]

PROJECT = nox.project.load_toml("pyproject.toml")


def group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


def starts(python: str) -> bool:
    """Version managers leave shims on the path that only print an error."""
    found = shutil.which(f"python{python}")
    return (
        found is not None and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    )


PYTHONS = [v for v in ("3.11", "3.12", "3.13", "3.14") if starts(v)]
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]

# These follow the current releases of their libraries; on the oldest jax the package itself is tested.
EXAMPLES_AND_DOCS = (
    "test_gemma4_*.py",
    "test_peers.py",
    "test_examples.py",
    "test_interop.py",
    "test_docs.py",
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# What of the suite tells in seconds that an installed package is whole.
QUICK = [f"tests/test_{name}.py" for name in ("package", "cli", "testing")]
IS_INSTALLED = """
import importlib.metadata, pathlib, sys, remat_scan
where = pathlib.Path(remat_scan.__file__)
assert where.is_relative_to(sys.prefix), f"{where} is not the installed package"
assert (where.parent / "py.typed").is_file(), "the package is not typed"
metadata = importlib.metadata.metadata("remat-scan")
assert metadata["Version"] == remat_scan.__version__
page = metadata.get_payload() or metadata["Description"]
assert page.startswith("# remat_scan") and "](docs/" not in page, "the index can't show that"
"""


@nox.session
@nox.parametrize(
    ("python", "jax", "compilers", "left_out"),
    [
        nox.param(NEWEST, "jax", "tpu-aot,gpu-aot", (), id="newest"),
        nox.param(OLDEST, "jax==0.10.0", "tpu-aot", EXAMPLES_AND_DOCS, id="oldest"),
    ],
)
def tests(session: nox.Session, jax: str, compilers: str, left_out: tuple[str, ...]) -> None:
    """The suite, on the newest and on the oldest Python and jax that this machine can have.

    Without the slow tests: `nox -s tests -- -m slow` runs those.
    """
    session.install("-e", f".[{compilers},examples]", jax, *group("test"))
    chosen = session.posargs or ["-m", "not slow", *(f"--ignore-glob=*{name}" for name in left_out)]
    session.run("python", "-m", "pytest", "-n", "2", *chosen, env={"HYPOTHESIS_PROFILE": "ci"})


# What a change in JAX could break: the combinators, and what proves that they work.
CORE = [
    f"tests/test_{name}.py"
    for name in (
        "layer", "policies", "stack", "blocks", "properties", "verify", "residuals", "testing"
    )
]  # fmt: skip
# Where JAX publishes its wheels of every night.
NIGHTLY_JAX = "https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/"


def core(session: nox.Session, *more: str, **env: str) -> None:
    chosen = session.posargs or ["-m", "not slow and not aot", *more]
    session.run("python", "-m", "pytest", "-n", "2", *CORE, *chosen, env=env)


# What reads traces refuses to read those of jax_remat3: of these files a test of the refusal remains.
READS_TRACES = "not (test_verify or test_residuals or assert_isolated) or remat3"


@nox.session(python=NEWEST)
@nox.parametrize(
    ("switch", "chosen"),
    [
        nox.param("JAX_REMAT3", ("-k", READS_TRACES), id="remat3"),
        nox.param("JAX_ENABLE_X64", (), id="x64"),
    ],
)
def canary(session: nox.Session, switch: str, chosen: tuple[str, ...]) -> None:
    """The core of the suite under a switch of JAX; on eight simulated devices, as all tests."""
    session.install("-e", ".", *group("test"))
    core(session, *chosen, **{switch: "1"})


@nox.session(python=NEWEST)
def prerelease(session: nox.Session) -> None:
    """The core of the suite on the newest jax, whether it is released or not."""
    session.install("-e", ".", *group("test"))
    session.install("--upgrade", "--pre", "--extra-index-url", NIGHTLY_JAX, "jax", "jaxlib")
    session.run("python", "-c", "import jax; print('jax', jax.__version__)")
    core(session)


@nox.session(python=NEWEST)
def nightly(session: nox.Session) -> None:
    """2,000 random programs against the plain loop, ten minutes of damaged files, and the mutations
    that the tests must catch. The figures go to `benchmarks/results`."""
    session.install("-e", ".[examples]", *group("test"))
    session.run("python", "tests/properties.py")
    session.run("python", "tests/fuzz_weights.py", "--minutes", "10")
    session.run("python", "tests/mutants.py")


@nox.session(python=NEWEST)
def lint(session: nox.Session) -> None:
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=NEWEST)
def types(session: nox.Session) -> None:
    session.install("-e", ".[examples]", *group("types"))
    session.run("pyright")


@nox.session(python=NEWEST)
def demo(session: nox.Session) -> None:
    """The main job: train a small decoder of unlike layers on real text and compare the memory."""
    session.install("-e", ".")
    session.run("remat-scan", "demo", *session.posargs)


@nox.session(python=NEWEST)
def benchmarks(session: nox.Session) -> None:
    """The benchmarks with all that they compare: `nox -s benchmarks -- peers`; see `-- --help`.

    Without arguments only the peers' tests: what the benchmarks compile takes hours.
    """
    session.install("-e", ".[tpu-aot,gpu-aot]", *group("peers"))
    if session.posargs:
        session.run("python", "-m", "benchmarks", *session.posargs)
    else:
        session.run("python", "-m", "pytest", "tests/test_peers.py", "tests/test_overlap.py")


@nox.session(python=NEWEST)
def docs(session: nox.Session) -> None:
    """The documentation; `nox -s docs -- serve` shows it while it is written."""
    session.install("-e", ".[docs]")
    arguments = session.posargs or ["build"]
    session.run("mkdocs", *arguments, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=NEWEST)
def site(session: nox.Session) -> None:
    """The documentation as a browser shows it; needs a Chromium or Chrome on the path."""
    session.install("-e", ".[docs]", *group("browser"))
    session.run("mkdocs", "build", env={"NO_MKDOCS_2_WARNING": "1"})
    if not any(map(shutil.which, BROWSERS)) and "CHROMIUM" not in os.environ:
        message = (
            f"NOBODY HAS LOOKED AT THE SITE: none of {', '.join(BROWSERS)} is on the path. Install one "
            "(apt-get install chromium), or set CHROMIUM to where it is."
        )
        if os.environ.get("GITHUB_ACTIONS"):
            print(f"::warning::{message}")
        session.skip(message)
    session.run("python", "docs/check_site.py", "site", *session.posargs)


@nox.session(python=NEWEST)
def notebooks(session: nox.Session) -> None:
    """The notebooks that the documentation offers, made from `examples/*.py`, run as notebooks."""
    session.install("-e", ".[docs,examples]", *group("notebooks"))
    session.run("python", "docs/run_notebooks.py", *session.posargs)


@nox.session(python=NEWEST)
def wheel(session: nox.Session) -> None:
    """What the index would offer: builds it, checks its page, tests it where the sources are not."""
    session.install(*group("release"), *group("test"))
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))  # the wheel is built from the sdist
    (built,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(built), str(source))
    # Tests alone: of the sources, nothing else is where they run.
    shutil.copytree("tests", dist / "tests")
    (dist / "pytest.ini").write_text("[pytest]\nmarkers =\n    aot\n    slow\n")
    session.install(str(source))
    with session.chdir(dist):
        session.run("python", "-c", IS_INSTALLED)
    session.install("--force-reinstall", "--no-deps", str(built))
    with session.chdir(dist):
        session.run("python", "-c", IS_INSTALLED)
        session.run("python", "-m", "pytest", "-q", "-m", "not slow and not aot", *QUICK)
        session.run("remat-scan", "doctor")
