"""Every fault on every rank in every phase of batch inference: how long the job takes to end, its code, its words.

    python -m tests.faults.table --ranks 2 > table.md        # a tiny model; about half an hour

Prints a Markdown table. Exits with 1 if a job or one of its ranks outlives its time, or if one ends with code 0.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cli.conftest import MpiRun
from tests.support.faulty import FAULTS, MARK_VARIABLE, PHASES
from tests.support.sets import make_sets, save_checkpoint

ALL_PHASES = ("start", *PHASES, "shutdown", "MPI_Finalize")
STALL_SECONDS = 5.0
END_SECONDS = 90.0
"""A job that has not ended so long after its fault hangs."""


@dataclass(frozen=True)
class Ending:
    """How a job ended: seconds since the fault, exit code of the launcher, last words of the ranks."""

    seconds: float
    code: int
    words: list[str]
    hangs: bool

    @property
    def is_good(self) -> bool:
        """Whether the job has failed, as it must, and in time."""
        return not self.hangs and self.code != 0


def meet(mpirun: MpiRun, ranks: int, shards: Path, fault: str, phase: str, rank: int) -> Ending:
    """Run a batch in which `rank` meets the fault in the phase."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, mark = Path(folder, "prompts.txt"), Path(folder, "mark")
        prompts.write_text("one\nanother, which is longer\n" * 4)
        flags = ["--shards", shards, "--input", prompts, "--output", Path(folder, "out"), "--device", "cpu"]
        flags += ["--max-new-tokens", 8, "--ignore-eos", "--stall-timeout", STALL_SECONDS]
        program = "-m", "tests.support.faulty", fault, phase, rank
        process = mpirun.start(ranks, *program, *flags, env={MARK_VARIABLE: str(mark)})
        try:
            _, errors = process.communicate("", END_SECONDS)
            hangs = False
        except subprocess.TimeoutExpired:
            hangs = True
            os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
        hangs = _ranks_outlive_their_job(prompts) or hangs
        assert mark.exists(), f"the fault {fault} in {phase} did not come: {errors}"
        seconds = time.time() - mark.stat().st_mtime
    words = [line for line in errors.splitlines() if line.startswith("mpi_tp: [rank") or "launcher is gone" in line]
    return Ending(seconds, process.returncode, words, hangs)


def _ranks_outlive_their_job(argument: Path) -> bool:
    """Wait for ranks with this argument to end; kill those that do not."""
    deadline = time.monotonic() + END_SECONDS / 3
    while left := _processes_with(str(argument).encode()):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(0.1)
    return False


def _processes_with(argument: bytes) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if argument in (process / "cmdline").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


def _row(fault: str, phase: str, rank: int, ending: Ending) -> str:
    verdict = "" if ending.is_good else " **HANGS**" if ending.hangs else " **code 0**"
    words = " / ".join(ending.words).replace("|", "\\|") or "-"
    return f"| {phase} | {fault} | {rank} | {ending.seconds:.1f} | {ending.code}{verdict} | {words} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", default="mpirun")
    parser.add_argument("--phases", nargs="+", choices=ALL_PHASES, default=ALL_PHASES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    options = parser.parse_args()
    mpirun, is_good = MpiRun(options.launcher), True
    with tempfile.TemporaryDirectory() as folder:
        shards = make_sets(save_checkpoint(Path(folder, "model")), Path(folder), options.ranks)[options.ranks]
        print("| phase | fault | rank | seconds to end | exit code | words |\n|---|---|---|---|---|---|", flush=True)
        for phase, fault, rank in itertools.product(options.phases, options.faults, range(options.ranks)):
            ending = meet(mpirun, options.ranks, shards, fault, phase, rank)
            is_good = is_good and ending.is_good
            print(_row(fault, phase, rank, ending), flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
