"""Batch jobs under a real Slurm, which the tests start on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ENVIRONMENT, ROOT
from tests.support.checkpoints import write_model_and_config
from tests.support.slurm import Slurm, missing_programs, running_slurm, wait_until
from tests.support.tiny import tiny_model

RUN_SH = ROOT / "run.sh"
LENGTHS = (3, 9, 1, 6, 4, 8, 2, 5)
MANY = 400
"""Lines that take seconds: time enough to strike."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started as root")
    if missing := missing_programs():
        pytest.skip(f"there is no {', '.join(missing)}: apt install slurm-wlm munge")
    with running_slurm() as running:
        yield running


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    source = write_model_and_config(tiny_model("llama"), folder)
    command = [sys.executable, "-m", "sharder", source, "--ranks", "2", "-o", folder / "set"]
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, capture_output=True)
    return folder / "set"


@pytest.fixture
def job(slurm: Slurm, shards: Path, tmp_path: Path) -> "BatchJob":
    return BatchJob(slurm, shards, tmp_path)


class BatchJob:
    """`sbatch run.sh infer` over prompts of its own, in a folder of its own."""

    def __init__(self, slurm: Slurm, shards: Path, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self._shards = shards
        self.input = folder / "prompts.jsonl"
        self.write_prompts(len(LENGTHS))

    def write_prompts(self, count: int) -> None:
        lines = [{"prompt_token_ids": [5 + number % 50] * LENGTHS[number % len(LENGTHS)]} for number in range(count)]
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def submit(self, *options: str, output: str = "out.jsonl", tokens: int = 4, input: Path | None = None) -> str:
        flags = ["--shards", self._shards, "--input", input or self.input, "--output", output, "--device", "cpu"]
        flags += ["--max-new-tokens", tokens, "--ignore-eos", "--logprobs"]
        batch = ["--ntasks=2", "--output=log", "--time=60", *options, RUN_SH, "infer", *flags]
        return self.slurm.submit(*batch, cwd=self.folder, VIRTUAL_ENV=sys.prefix, **ENVIRONMENT)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, job: str) -> dict[str, str]:
        return self.slurm.wait_for(job, *ENDED)

    def records(self, name: str = "out.jsonl") -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The records of 8 short answers."""
    job = BatchJob(slurm, shards, tmp_path_factory.mktemp("undisturbed"))
    ended = job.wait(job.submit())
    assert ended["JobState"] == "COMPLETED", job.log()
    return job.records()


def test_a_job_writes_its_records_and_its_id(job, undisturbed):
    assert [record["id"] for record in undisturbed] == list(range(1, 9))
    assert [record["prompt_tokens"] for record in undisturbed] == list(LENGTHS)


def test_tasks_of_an_array_share_the_lines(job, undisturbed):
    number = job.submit("--array=0-1", "--output=log-%a", output="out-%a.jsonl")
    for task in range(2):
        ended = job.wait(f"{number}_{task}")
        assert ended["JobState"] == "COMPLETED", (job.folder / f"log-{task}").read_text()
    parts = [job.records(f"out-{task}.jsonl") for task in range(2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1], key=lambda record: record["id"]) == undisturbed


def start_long(job: BatchJob, *options: str) -> str:
    """Submit a job of many lines and wait for its first records; return its id."""
    job.write_prompts(MANY)
    number = job.submit(*options, tokens=24)
    journal = job.folder / "out.jsonl.journal"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 20, "the job writes no records")
    return number


@pytest.fixture(scope="module")
def long_records(slurm: Slurm, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    job = BatchJob(slurm, shards, tmp_path_factory.mktemp("long"))
    job.write_prompts(MANY)
    assert job.wait(job.submit(tokens=24))["JobState"] == "COMPLETED", job.log()
    return job.records()


def test_a_warned_job_is_requeued_and_goes_on(job, long_records):
    number = start_long(job)
    job.slurm.run("scancel", "--batch", "--signal=USR1", number)  # as Slurm does a minute before the walltime
    ended = job.wait(number)
    assert ended["JobState"] == "COMPLETED", job.log()
    assert ended["Restarts"] == "1", job.log()
    assert f"job {number} is back in the queue" in job.log()
    assert job.records() == long_records


def test_a_job_that_may_not_be_requeued_is_submitted_again(job, long_records):
    number = start_long(job, "--no-requeue")
    job.slurm.run("scancel", "--batch", "--signal=USR1", number)
    assert job.wait(number)["JobState"] == "FAILED", job.log()
    again = job.log().split("Submitted batch job ")[1].split()[0]
    assert job.wait(again)["JobState"] == "COMPLETED", job.log()
    assert job.records() == long_records


@pytest.mark.parametrize("option", ["--requeue", "--no-requeue"])
def test_of_an_array_only_the_warned_task_starts_again(job, long_records, option):
    """It is the last one, whose number is that of the whole array."""
    job.write_prompts(MANY)
    number = job.submit("--array=0-1", "--output=log", option, output="out-%a.jsonl", tokens=24)
    wait_until(lambda: (job.folder / "out-1.jsonl.journal").exists(), "task 1 writes no records")
    job.slurm.run("scancel", "--batch", "--signal=USR1", f"{number}_1")
    for name in ("out-0.jsonl", "out-1.jsonl"):
        wait_until((job.folder / name).exists, f"{name} does not appear")
    assert job.slurm.job(f"{number}_0")["Restarts"] == "0"
    words = [line for line in job.log().splitlines() if line.startswith("mpi_tp:")]  # run.sh repeats them
    assert sum("stopped by SIGUSR1" in line for line in words) == 1, job.log()
    parts = [job.records(f"out-{task}.jsonl") for task in range(2)]
    assert sorted(parts[0] + parts[1], key=lambda record: record["id"]) == long_records


def test_a_cancelled_job_stays_cancelled_and_its_records_stay(job):
    number = start_long(job)
    job.slurm.run("scancel", number)
    assert job.wait(number)["JobState"] == "CANCELLED"
    wait_until(lambda: not ranks_of(job), f"ranks live on:\n{job.log()}")
    assert job.slurm.job(number)["Restarts"] == "0"
    assert (job.folder / "out.jsonl.journal").exists()


def ranks_of(job: BatchJob) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if "mpi_tp.infer" in line and str(job.input) in line]


def test_a_row_of_singletons_is_refused(job):
    script = job.folder / "singletons.sh"
    script.write_text(f"#!/bin/bash\nsrun --mpi=none --kill-on-bad-exit=1 {sys.executable} -m mpi_tp.infer --limit 1\n")
    batch = ["--ntasks=2", "--output=log", "--time=5", script]
    number = job.slurm.submit(*batch, cwd=job.folder, PYTHONPATH=str(ROOT), **ENVIRONMENT)
    ended = job.wait(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "78:0"), job.log()
    assert job.log().count("the launcher started 2 ranks") == 1


def test_srun_starts_the_ranks_of_mpich(job, undisturbed, mpich: dict[str, str]):
    script = job.folder / "mpich.sh"
    flags = f"--shards {job._shards} --input {job.input} --output out.jsonl --device cpu"
    options = "--max-new-tokens 4 --ignore-eos --logprobs"
    script.write_text(f"#!/bin/bash\nsrun --mpi=pmi2 {sys.executable} -m mpi_tp.infer {flags} {options}\n")
    batch = ["--ntasks=2", "--output=log", "--time=5", script]
    variables = {**ENVIRONMENT, **mpich, "PYTHONPATH": str(ROOT)}
    number = job.slurm.submit(*batch, cwd=job.folder, **variables)
    assert job.wait(number)["JobState"] == "COMPLETED", job.log()
    assert job.records() == undisturbed


@pytest.fixture
def mpich() -> dict[str, str]:
    """What makes mpi4py load the MPICH that lies in a folder of its own."""
    folder = Path(os.environ.get("MPI_TP_MPICH", ROOT / ".mpich"))
    if not shutil.which("mpiexec", path=folder / "bin"):
        pytest.skip(f"no MPICH in {folder}: pip install --prefix {folder} mpich")
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder / "lib")}
