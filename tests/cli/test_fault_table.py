"""A fault in each phase of batch inference; `python -m tests.faults.table` has all of them, on every rank."""

from pathlib import Path

import pytest

from tests.cli.conftest import MpiRun
from tests.faults.table import ALL_PHASES, meet
from tests.support.sets import make_sets, save_checkpoint

FAULTS = [
    ("start", "SIGSTOP", 1, 75),
    ("connect", "exception", 0, 70),
    ("load", "out of memory", 1, 78),
    ("prefill", "SystemExit", 1, 70),
    ("decode", "stall", 1, 75),
    ("gather", "SIGSEGV", 0, None),
    ("write", "SIGKILL", 1, None),
    ("shutdown", "SIGSTOP", 0, 75),
    ("MPI_Finalize", "mpirun killed", 1, None),
]
"""With the exit code of the contract; None where it is the launcher's own, which run.sh makes 75."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return make_sets(save_checkpoint(folder / "model"), folder, 2)[2]


@pytest.mark.parametrize(("phase", "fault", "rank", "code"), FAULTS)
def test_a_fault_ends_the_job(
    mpirun: MpiRun, shards: Path, phase: str, fault: str, rank: int, code: int | None
) -> None:
    ending = meet(mpirun, 2, shards, fault, phase, rank)
    assert ending.is_good, ending
    if code:
        assert ending.code == code, ending
        [words] = ending.words
        for part in ("rank ", "host ", "device ", "phase ", "step "):
            assert part in words


def test_no_phase_is_left_out() -> None:
    assert {phase for phase, *_ in FAULTS} == set(ALL_PHASES)
