"""The pytest plugin of remat_scan: the fixture `memory_snapshot`.

A module of its own that imports nothing of the package until a test asks for the fixture: pytest loads
plugins before a project's `conftest.py`, which may have to set what jax reads when it is imported.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("remat_scan").addoption(
        "--memory-snapshot-update",
        action="store_true",
        help="write the memory reports that memory_snapshot compares with",
    )


@pytest.fixture
def memory_snapshot(request: pytest.FixtureRequest):
    """Compares a program's memory with a report stored beside the test: `MemorySnapshots`."""
    from remat_scan.testing import MemorySnapshots

    path = request.path
    return MemorySnapshots(
        path.parent / "memory_snapshots" / path.stem,
        request.node.name,
        request.config.getoption("--memory-snapshot-update"),
    )
