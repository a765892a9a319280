"""A fault on any rank ends all of them, in time, with one line and the right exit code."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT, ROOT, MpiRun

PROGRAM = """
import os, signal, sys, time
from mpi_tp import launch
from mpi_tp.errors import ConfigurationError

fault, guilty, others = sys.argv[1:]

def main(job):
    with job.phase("load"):
        job.progress()
    with job.phase("work"):
        job.progress()
        if guilty in ("all", str(job.rank)):
            if fault == "exception":
                raise ValueError("two\\nlines")
            if fault == "exit":
                sys.exit(3)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stall":
                time.sleep(1000)
            if fault == "configuration":
                raise ConfigurationError("4 ranks, 2 heads: use -np 2")
            if fault == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1000)
            if fault == "slow":
                for _ in range(12):
                    time.sleep(0.25)
                    job.progress()
        elif others == "collective":
            from mpi_tp.comm.mpi import MpiCommunicator
            MpiCommunicator(job.world).barrier()
    if job.rank == 0:
        print("done")
    return 0

launch.run(main, stall_timeout=1.5 if fault in ("stall", "slow") else 60)
"""

FAULTS = {  # exit codes: one, or one for each MPI; what the line says; number of tracebacks
    "exception": ({70}, r"\[rank {rank}/3\] ValueError: two lines {place}", 1),
    "exit": ({70}, r"\[rank {rank}/3\] SystemExit: 3 {place}", 1),
    "stall": ({75}, r"\[rank {rank}/3\] no progress for 1.5 s, at \S+:\d+ \(main\) {place}", 0),
    "configuration": ({78}, r"\[rank {rank}/3\] 4 ranks, 2 heads: use -np 2 {place}", 0),
    "signal": ({75}, r"\[rank {rank}/3\] stopped by SIGTERM: run the same command again {place}", 0),
}

PLACE = r"\(host \S+, device none yet, phase 'work', step 1\)$"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "program.py"
    path.write_text(PROGRAM)
    return path


def last_words(stderr: str) -> list[str]:
    """Return what the ranks say themselves, without what the launcher adds."""
    return [line for line in stderr.replace("\0", "").splitlines() if line.startswith("mpi_tp:")]


def check_fault(result: subprocess.CompletedProcess[str], fault: str, rank: int) -> None:
    exit_codes, words, tracebacks = FAULTS[fault]
    assert result.returncode in exit_codes, result.stderr
    (line,) = last_words(result.stderr)
    assert re.match("mpi_tp: " + words.replace("{rank}", str(rank)).replace("{place}", PLACE), line), line
    assert result.stderr.count("Traceback") == tracebacks
    assert "done" not in result.stdout


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_ranks_that_have_finished_the_phase(mpirun: MpiRun, program: Path, fault: str, rank: int) -> None:
    check_fault(mpirun(3, program, fault, str(rank), "finish"), fault, rank)


@pytest.mark.parametrize(("fault", "rank"), [("exception", 0), ("stall", 1), ("configuration", 2)])
def test_a_fault_ends_ranks_that_wait_in_a_collective(mpirun: MpiRun, program: Path, fault: str, rank: int) -> None:
    check_fault(mpirun(3, program, fault, str(rank), "collective"), fault, rank)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_all_ranks_is_told_once(mpirun: MpiRun, program: Path, fault: str) -> None:
    check_fault(mpirun(3, program, fault, "all", "finish"), fault, rank=0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_ends_the_others(mpirun: MpiRun, program: Path, rank: int) -> None:
    result = mpirun(3, program, "kill", str(rank), "collective", timeout=30)
    assert result.returncode in (137, 9)  # Open MPI, MPICH
    assert "done" not in result.stdout


def test_a_slow_rank_is_waited_for(mpirun: MpiRun, program: Path) -> None:
    """It takes twice the stall timeout, but makes progress."""
    result = mpirun(3, program, "slow", "1", "finish")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_one_rank_needs_no_launcher(program: Path) -> None:
    command = [sys.executable, program, "none", "0", "finish"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone(), timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(("fault", "exit_code"), [("exception", 70), ("stall", 75), ("configuration", 78)])
def test_one_rank_fails_with_the_same_codes(program: Path, fault: str, exit_code: int) -> None:
    command = [sys.executable, program, fault, "0", "finish"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone(), timeout=60)
    assert result.returncode == exit_code
    assert len(last_words(result.stderr)) == 1


def alone(**variables: str) -> dict[str, str]:
    """Return the environment of a process that no launcher has started."""
    launchers = ("OMPI_", "PMI", "PMIX_", "SLURM_", "PRTE_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**own, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **variables}


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
        {"PMI_SIZE": "4", "PMI_RANK": "0"},
    ],
)
def test_a_row_of_singletons_is_noticed(program: Path, variables: dict[str, str]) -> None:
    command = [sys.executable, program, "none", "0", "finish"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone(**variables), timeout=60)
    assert result.returncode == 78
    (line,) = last_words(result.stderr)
    assert "started 4 ranks" in line
    assert next(iter(variables)) in line
    assert "MPI sees 1" in line


def test_a_missing_mpi_is_told_in_one_line(program: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: initialize = True")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nno libmpi.so.40')")
    command = [sys.executable, program, "none", "0", "finish"]
    env = alone(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
    assert result.returncode == 78
    assert result.stderr.startswith("mpi_tp: mpi4py finds no MPI")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("n", [1, 3])
def test_an_uncaught_exception_in_a_script_ends_all_ranks(mpirun: MpiRun, tmp_path: Path, n: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mpi_tp import launch\n"
        "from mpi_tp.errors import FileError\n"
        "job = launch.join()\n"
        "if job.rank == job.size - 1:\n"
        "    raise FileError('a.h5 is damaged: shard again')\n"
        "job.world.Barrier()\n"
    )
    result = mpirun(n, script)
    assert result.returncode == 74
    (line,) = last_words(result.stderr)
    assert line.startswith(f"mpi_tp: [rank {n - 1}/{n}] a.h5 is damaged: shard again (host ")
    assert "Traceback" not in result.stderr


def test_ranks_end_when_their_launcher_is_killed(mpirun: MpiRun, tmp_path: Path) -> None:
    script = tmp_path / "pids.py"
    script.write_text(
        "import os, time\nfrom mpi_tp import launch\n"
        "def main(job):\n"
        f"    open(f'{tmp_path}/{{job.rank}}.new', 'w').write(str(os.getpid()))\n"
        f"    os.replace(f'{tmp_path}/{{job.rank}}.new', f'{tmp_path}/{{job.rank}}.pid')\n"
        "    time.sleep(1000)\n"
        "launch.run(main)\n"
    )
    process = mpirun.start(2, script)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    process.kill()
    process.communicate()
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_the_launcher_passes_on_the_signal_before_the_walltime(mpirun: MpiRun, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import time\nfrom mpi_tp import launch\n"
        "def main(job):\n"
        "    with job.phase('work'):\n"
        f"        open(f'{tmp_path}/{{job.rank}}.up', 'w')\n"
        "        time.sleep(1000)\n"
        "launch.run(main)\n"
    )
    process = mpirun.start(2, script)
    wait_until(lambda: len(list(tmp_path.glob("*.up"))) == 2)
    process.send_signal(mpirun.stop_signal)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    stopped = f"stopped by {mpirun.stop_signal.name}: run the same command again"
    (line,) = last_words(err)
    assert line.startswith(f"mpi_tp: [rank 0/2] {stopped} (host ")


USAGE = """
import argparse, sys
from mpi_tp import launch
from mpi_tp.errors import UsageError

with launch.before_mpi():
    parser = argparse.ArgumentParser(prog="usage")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    if options.ranks == 0:
        raise UsageError("--ranks 0: give 1 or more")
"""


@pytest.mark.parametrize(
    ("argument", "exit_code", "out", "err"),
    [
        ("--help", 0, "usage: usage", ""),
        ("--rank=x", 2, "", "usage: error: argument --ranks: invalid int value"),
        ("--ranks=0", 2, "", "mpi_tp: --ranks 0: give 1 or more"),
    ],
)
def test_usage_is_told_once_and_starts_no_mpi(
    mpirun: MpiRun, tmp_path: Path, argument: str, exit_code: int, out: str, err: str
) -> None:
    script = tmp_path / "usage.py"
    script.write_text(USAGE + "assert 'mpi4py' not in sys.modules\n")
    result = mpirun(3, script, argument, timeout=30)
    assert result.returncode == exit_code
    assert result.stdout.count(out or "nothing") == (1 if out else 0)
    assert result.stderr.count(err or "nothing") == (1 if err else 0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.05)
