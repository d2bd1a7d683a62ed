"""Every job of this project, each in a clean environment that nox makes: ``nox -l`` lists them."""

import shutil
import subprocess

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
EXAMPLES_AND_DOCS = ("test_gemma4_*.py", "test_examples.py", "test_interop.py", "test_docs.py")


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
    session.run("python", "-m", "pytest", "-n", "2", *chosen)


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
def docs(session: nox.Session) -> None:
    """The documentation; `nox -s docs -- serve` shows it while it is written."""
    session.install("-e", ".[docs]")
    arguments = session.posargs or ["build"]
    session.run("mkdocs", *arguments, env={"NO_MKDOCS_2_WARNING": "1"})
