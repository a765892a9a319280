"""The same pytest session on every rank of an mpirun; for the conftest of tests that run so.

Rank 0 reports. A rank whose test fails prints its traceback and ends all ranks, since the others wait for it; a rank
that hangs prints its stack and ends them too.
"""

import faulthandler
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
HANG_SECONDS = 120


def pytest_report_header() -> str:
    return f"MPI: {WORLD.size} ranks, {MPI.Get_library_version().splitlines()[0]}"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Silence the report of all ranks but 0."""
    if WORLD.rank:
        config.pluginmanager.unregister(name="terminalreporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and WORLD.size > 1:
        assert sys.__stderr__ is not None
        sys.__stderr__.write(f"[rank {WORLD.rank}/{WORLD.size}] {item.nodeid} failed\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        WORLD.Abort(1)
    return report


@pytest.fixture(autouse=True)
def in_step() -> Iterator[None]:
    """Let no rank run ahead into the next test, and end a test that hangs."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    yield
    WORLD.Barrier()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def shared_tmp_path(tmp_path: Path) -> Path:
    """A folder that all ranks see: rank 0's."""
    return WORLD.bcast(tmp_path)
