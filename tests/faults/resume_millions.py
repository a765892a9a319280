"""A huge input of which nearly all lines are in the journal: resumed in minutes, in memory that does not grow.

    python -m tests.faults.resume_millions                       # 5,000,000 lines, 1,000 left, 100 of these bad
    python -m tests.faults.resume_millions --lines 200000 --gz

Makes the input and a journal as an earlier run would have left it, resumes on one rank, and prints rank 0's memory over
time. Exits with 1 if the output is not whole or if memory grows by more than 64 MiB while lines are read.
"""

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpi_tp.engine.request import SamplingParams
from mpi_tp.records import LineKeys, prompt_lines
from mpi_tp.records.journal import Journal
from mpi_tp.shards.reader import ShardSet
from tests.cli.conftest import ROOT
from tests.cli.test_launch import alone
from tests.support.sets import make_sets, save_checkpoint

MOST_GROWTH = 64 << 20
SAMPLE_SECONDS = 0.5
MAX_NEW_TOKENS = 3


def write_input(path: Path, count: int, every: int) -> None:
    """Write `count` lines; of each `every` one is not in the journal, and of ten of these one is bad."""
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        for number in range(1, count + 1):
            is_bad = number % (10 * every) == 0
            file.write("{bad\n" if is_bad else f'{{"prompt": "prompt {number}"}}\n')


def write_journal(path: Path, keys: LineKeys, count: int, every: int) -> None:
    """Write the records of all lines but one of each `every`."""
    lines = prompt_lines((f"prompt {number}" for number in range(1, count + 1)), SamplingParams(MAX_NEW_TOKENS))
    with Journal.open(path) as journal:
        journal.recover(lambda _: None, lambda: None)
        for line in lines:
            if line.number % every:
                record = (
                    b'{"id": %d, "text": "abc", "token_ids": [97, 98, 99], "finish_reason": "length", '
                    b'"prompt_tokens": 12, "completion_tokens": 3}' % line.number
                )
                journal.append(line.number, keys.of(line), record)


def set_keys(shards: ShardSet) -> LineKeys:
    """Return the keys of lines under a set, invariant on CPU."""
    from mpi_tp.infer_job import key_basis

    return LineKeys(key_basis(shards, "cpu", invariant=True))


def resume(command: list[str]) -> list[tuple[float, int]]:
    """Run to the end; return the seconds and the resident memory in bytes of each sample. No launcher, so rank 0."""
    samples = []
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=alone(CUDA_VISIBLE_DEVICES=""))
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        if resident:
            samples.append((time.monotonic() - start, int(resident[1]) * 1024))
        time.sleep(SAMPLE_SECONDS)
    assert process.returncode == 0, f"exit code {process.returncode}"
    return samples


def check_output(path: Path, count: int) -> int:
    """Check that line i has id i; return the number of error records."""
    errors = number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            assert line.startswith(b'{"id": %d, ' % number), (number, line)
            errors += b'"error": {"type": "invalid_json"' in line
    assert number == count, f"{number} records of {count} lines"
    return errors


def main() -> int:
    """Run as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--left", type=int, default=1000, help="lines that are not in the journal")
    parser.add_argument("--gz", action="store_true", help="compress the input")
    options = parser.parse_args()
    every = options.lines // options.left
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = make_sets(save_checkpoint(folder / "model"), folder, 1)[1]
        lines, output = folder / f"in.jsonl{'.gz' if options.gz else ''}", folder / "out.jsonl"
        write_input(lines, options.lines, every)
        write_journal(folder / "out.jsonl.journal", set_keys(ShardSet.open(shards)), options.lines, every)
        size = os.path.getsize(folder / "out.jsonl.journal")
        print(f"{options.lines} lines, journal of {size / 2**20:.0f} MiB", flush=True)
        command = [sys.executable, "-m", "mpi_tp.infer", "--shards", shards, "--input", lines, "--output", output]
        samples = resume([*map(str, command), "--resume", "--device", "cpu", "--max-new-tokens", str(MAX_NEW_TOKENS)])
        print(
            "seconds: "
            + ", ".join(f"{seconds:.0f}: {memory >> 20} MiB" for seconds, memory in samples[:: len(samples) // 20 + 1])
        )
        working = [memory for _, memory in samples[len(samples) // 4 :]]
        growth = max(working) - working[0]
        errors = check_output(output, options.lines)
        peak = max(working)
        print(f"{samples[-1][0]:.0f} s, peak {peak >> 20} MiB, grown by {growth >> 20} MiB, {errors} error records")
    return 0 if growth < MOST_GROWTH and errors == options.left // 10 else 1


if __name__ == "__main__":
    sys.exit(main())
