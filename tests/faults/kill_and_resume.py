"""A batch that is killed again and again, and resumed each time, gives the bytes of one that is left alone.

    python -m tests.faults.kill_and_resume                                   # a tiny model, 2,000 lines, 25 deaths
    python -m tests.faults.kill_and_resume --shards demo/shards --ranks 3    # any shard set

Prints a row for each death: what was done to whom, when, how long the job took to end and with which code. Exits with 1
if a job outlives its time, ends with a code that the contract does not have, or if the bytes differ.
"""

import argparse
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import MpiRun
from tests.support.processes import rank_pids
from tests.support.sets import TEMPLATE, make_sets, save_checkpoint

END_SECONDS = 120
"""More than a job may take to end; generous, as the machine may be slow."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a job, and the exit codes of Open MPI's and MPICH's launchers after it."""

    name: str
    strike: Callable[["Run"], object]
    exit_codes: tuple[int, ...]


@dataclasses.dataclass
class Run:
    """A job that runs, and a rank of it that was picked."""

    launcher: int
    pids: dict[int, int]
    journal: Path
    rank: int

    def signal_rank(self, number: int) -> None:
        os.kill(self.pids[self.rank], number)

    def fill_disk(self) -> None:
        """Let no file of rank 0 grow by more than a few records from now on."""
        size = self.journal.stat().st_size + random.randrange(600)
        resource.prlimit(self.pids[0], resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def faults(stop_signal: int) -> list[Fault]:
    """Return the faults; `stop_signal` is what the launcher hands on to its ranks."""
    return [
        Fault("rank, SIGKILL", lambda run: run.signal_rank(signal.SIGKILL), (137, 9)),
        Fault("mpirun, SIGKILL", lambda run: os.kill(run.launcher, signal.SIGKILL), (-9,)),
        Fault("rank, SIGTERM", lambda run: run.signal_rank(signal.SIGTERM), (75,)),
        Fault("rank, SIGUSR1", lambda run: run.signal_rank(signal.SIGUSR1), (75,)),
        Fault("rank, SIGINT", lambda run: run.signal_rank(signal.SIGINT), (75,)),
        Fault("mpirun, stop", lambda run: os.kill(run.launcher, stop_signal), (75,)),
        Fault("disk full", lambda run: run.fill_disk(), (74,)),
    ]


class Batch:
    """The command that is started again and again."""

    def __init__(self, mpirun: MpiRun, ranks: int, shards: Path, lines: Path, folder: Path, *flags: str) -> None:
        self._mpirun = mpirun
        self._ranks = ranks
        self._arguments = ("-m", "mpi_tp.infer", "--shards", shards, "--input", lines, "--device", "cpu", *flags)
        self.output = folder / "out.jsonl"
        self.journal = folder / "out.jsonl.journal"

    def whole(self, output: Path) -> bytes:
        """Return what a run that is left alone writes."""
        result = self._mpirun(self._ranks, *self._arguments, "--output", output, timeout=7200)
        assert result.returncode == 0, result.stderr
        return output.read_bytes()

    def num_records(self) -> int:
        """Return how many records are in the journal."""
        return self.journal.read_bytes().count(b"\n") - 1 if self.journal.exists() else 0

    def strike(self, fault: Fault, rank: int, num_records: int) -> tuple[int, float]:
        """Run until there are `num_records` more records, then strike; return exit code and seconds to the end."""
        target = self.num_records() + num_records
        process = self._mpirun.start(self._ranks, *self._arguments, "--output", self.output, "--resume")
        try:
            self._wait(process, lambda: len(rank_pids(process.pid)) == self._ranks and self.num_records() >= target)
            if process.poll() is not None:
                return process.returncode, 0.0
            run = Run(process.pid, rank_pids(process.pid), self.journal, rank)
            fault.strike(run)
            since = time.monotonic()
            process.communicate(timeout=END_SECONDS)
            while any(Path(f"/proc/{pid}").exists() for pid in run.pids.values()):
                assert time.monotonic() - since < END_SECONDS, "a rank lives on"
                time.sleep(0.02)
            return process.returncode, time.monotonic() - since
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Resume to the end."""
        flags = ("--output", self.output, "--resume")
        result = self._mpirun(self._ranks, *self._arguments, *flags, timeout=7200)
        assert result.returncode == 0, result.stderr

    def _wait(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 1800
        while not condition() and process.poll() is None:
            assert time.monotonic() < deadline, "the job makes no records"
            time.sleep(0.005)


def write_lines(path: Path, count: int, seed: int, max_new_tokens: int) -> None:
    """Write a mix of prompts, options and lines that cannot be served."""
    numbers = random.Random(seed)
    with path.open("w") as file:
        for number in range(1, count + 1):
            line: dict[str, object] = {"prompt": f"Line {number} tells of {numbers.choice(['ships', 'bread', 'snow'])}"}
            line["max_new_tokens"] = numbers.randrange(1, max_new_tokens + 1)
            if number % 3 == 0:
                line |= {"temperature": 1.0, "id": f"line {number % 7}"}
            if number % 50 == 0:
                line |= {"n": 3, "logprobs": True, "temperature": 0.8}
            file.write("{bad\n" if number % 97 == 0 else json.dumps(line) + "\n")


def kill_and_resume(batch: Batch, kinds: list[Fault], count: int, kills: int, ranks: int) -> list[str]:
    """Let the job die `kills` times at random moments, then finish it; return a row for each death."""
    rows = []
    for number in range(kills):
        fault, rank = kinds[number % len(kinds)], random.randrange(ranks)
        before = batch.num_records()
        share = max(1, (count - before) // (kills - number + 1))
        code, seconds = batch.strike(fault, rank, random.randrange(2 * share))
        row = f"| {number + 1} | {fault.name} | {rank} | {before} | {batch.num_records()} | {code} | {seconds:.1f} |"
        print(row, flush=True)
        rows.append(row)
        if code == 0:
            break  # it had come to its end before it was struck
        assert code in fault.exit_codes, f"{fault.name}: exit code {code}, expected one of {fault.exit_codes}"
    batch.finish()
    return rows


def main() -> int:
    """Run as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, help="a shard set for --ranks ranks (a tiny model that is made)")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    launcher = shutil.which("mpirun")
    assert launcher, "there is no mpirun"
    mpirun = MpiRun(launcher)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = (
            options.shards
            or make_sets(save_checkpoint(folder / "model", chat_template=TEMPLATE), folder, options.ranks)[
                options.ranks
            ]
        )
        write_lines(folder / "in.jsonl", options.lines, options.seed, options.max_new_tokens)
        batch = Batch(mpirun, options.ranks, shards.absolute(), folder / "in.jsonl", folder, "--max-batch-size", "16")
        start = time.monotonic()
        whole = batch.whole(folder / "whole.jsonl")
        print(f"{options.lines} lines on {options.ranks} ranks, left alone: {time.monotonic() - start:.0f} s")
        print("| # | fault | rank | records before | after | exit code | seconds to the end |")
        print("|---|---|---|---|---|---|---|")
        kill_and_resume(batch, faults(mpirun.stop_signal), options.lines, options.kills, options.ranks)
        same = batch.output.read_bytes() == whole
        leftovers = {path.name for path in folder.iterdir()} - {"in.jsonl", "model", shards.name, "shards-3"}
        print(
            f"in all {time.monotonic() - start:.0f} s; bytes {'equal' if same else 'DIFFER'}; files {sorted(leftovers)}"
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
