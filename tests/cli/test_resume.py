"""A job that dies goes on where it was, with the same bytes in the end; see `tests/faults` for many more deaths."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, MpiRun
from tests.cli.test_infer_faults import SlowInput, check_failure
from tests.cli.test_launch import alone, last_words, wait_until
from tests.faults.kill_and_resume import Batch, faults, kill_and_resume, write_lines
from tests.support.processes import rank_pids
from tests.support.sets import TEMPLATE, make_sets, save_checkpoint

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LINE = '{"prompt": "one", "max_new_tokens": 4}\n'


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("resume")
    return make_sets(save_checkpoint(folder / "model", chat_template=TEMPLATE), folder, 1, 2)


def infer_alone(shards: Path, *flags: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpi_tp.infer", "--shards", shards, "--device", "cpu", *flags]
    env = alone(**WITHOUT_GPU, **variables)
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)


def test_killed_and_resumed_the_bytes_are_the_same(mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path) -> None:
    """A rank, the launcher, and a full disk."""
    write_lines(tmp_path / "in.jsonl", 100, seed=1, max_new_tokens=24)
    batch = Batch(mpirun, 2, sets[2], tmp_path / "in.jsonl", tmp_path, "--max-batch-size", "8")
    whole = batch.whole(tmp_path / "whole.jsonl")
    chosen = [fault for fault in faults(mpirun.stop_signal) if fault.name in KILLS]
    assert len(kill_and_resume(batch, chosen, 100, kills=3, ranks=2)) == 3
    assert batch.output.read_bytes() == whole
    assert not batch.journal.exists()


KILLS = ("rank, SIGKILL", "mpirun, SIGKILL", "disk full")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_any_rank_stops_the_job(
    mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path, number: signal.Signals
) -> None:
    slow_input = SlowInput(tmp_path / "in.jsonl")
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    files = ("--input", slow_input.path, "--output", output)
    process = mpirun.start(2, "-m", "mpi_tp.infer", "--shards", sets[2], *files, env=WITHOUT_GPU)
    slow_input.write(LINE)
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 2)
    os.kill(rank_pids(process.pid)[1], number)
    _, err = process.communicate(timeout=60)
    slow_input.close()
    assert process.returncode == 75, err
    (line,) = last_words(err)
    assert f"stopped by {number.name} to another rank: 1 of the records are safe" in line
    assert "the same command with --resume goes on" in line
    assert not output.exists()


def test_what_resume_needs(sets: dict[int, Path], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.journal").write_text('{"journal of": "mpi_tp.infer", "version": 1}\n')
    assert infer_alone(sets[1], "--output", output, "--resume").returncode == 0  # nothing to go on with: it starts
    check_resume_refused(infer_alone(sets[1], "--resume"))


def check_resume_refused(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 2
    assert "--resume goes on from the journal beside an output file" in result.stderr


def test_a_journal_is_not_overwritten_and_an_edited_input_is_served_in_part(
    sets: dict[int, Path], tmp_path: Path
) -> None:
    lines, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(LINE * 3)
    flags = ("--input", lines, "--output", output)
    assert infer_alone(sets[1], *flags).returncode == 0
    first = output.read_bytes()
    output.unlink()
    lines.write_text(LINE * 2 + "{bad\n")
    blocked = tmp_path / "out.jsonl.meta.json"  # the last file that is written: the journal is still there
    blocked.unlink()
    blocked.mkdir()
    assert infer_alone(sets[1], *flags).returncode == 74
    check_failure(infer_alone(sets[1], *flags), 78, "out.jsonl.journal holds records", "--resume, or remove it")
    blocked.rmdir()
    lines.write_text(LINE * 3)
    result = infer_alone(sets[1], *flags, "--resume")
    assert "3 lines (2 from earlier runs), 0 errors" in result.stderr
    assert output.read_bytes() == first


def test_the_tasks_of_an_array_share_the_lines(sets: dict[int, Path], tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(LINE * 5)
    flags = ("--input", lines, "--temperature", "1")
    whole = infer_alone(sets[1], *flags).stdout.splitlines()
    for task in (3, 4):
        array = {"ID": task, "COUNT": 2, "MIN": 3, "MAX": 4, "STEP": 1}
        variables = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in array.items()}
        result = infer_alone(sets[1], *flags, "--output", tmp_path / "out-%a.jsonl", **variables)
        assert f"serves line {task - 2} of the input and each 2 lines further" in result.stderr
        records = (tmp_path / f"out-{task}.jsonl").read_text().splitlines()
        assert records == whole[task - 3 :: 2]
        assert [json.loads(record)["id"] for record in records] == list(range(task - 2, 6, 2))
