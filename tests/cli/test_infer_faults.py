"""What goes wrong around batch inference ends with the right code and one line that says what to do."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import pytest

from tests.cli.conftest import ROOT, MpiRun
from tests.cli.test_launch import alone, last_words, wait_until
from tests.support.processes import rank_pids
from tests.support.sets import make_sets, save_checkpoint
from tests.support.shards import flip

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LINE = '{"prompt": "one", "max_new_tokens": 4}\n'


Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("infer")
    return make_sets(save_checkpoint(folder / "model"), folder, 1, 2)


@pytest.fixture
def copied(sets: dict[int, Path], tmp_path: Path) -> Path:
    """A set of two ranks of which a test may spoil something."""
    return Path(shutil.copytree(sets[2], tmp_path / "shards"))


def check_failure(result: Result, code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    (line,) = last_words(result.stderr)
    for word in words:
        assert word in line
    assert "Traceback" not in result.stderr
    assert not any(line.startswith("{") for line in result.stdout.splitlines())


def infer(mpirun: MpiRun, ranks: int, shards: Path, *flags: str | Path) -> Result:
    return mpirun(ranks, "-m", "mpi_tp.infer", "--shards", shards, *flags, env=WITHOUT_GPU)


def infer_alone(shards: Path, *flags: str | Path, file_size: int = resource.RLIM_INFINITY) -> Result:
    return subprocess.run(
        [sys.executable, "-m", "mpi_tp.infer", "--shards", shards, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=alone(**WITHOUT_GPU),
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size)),
    )


def test_the_wrong_number_of_ranks(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    hint = "holds 2 ranks but mpirun started 3: use -np 2 or a multiple of it, or python -m sharder SOURCE --ranks 3"
    check_failure(infer(mpirun, 3, sets[2]), 78, f"{sets[2]}/ {hint}")


def test_invariant_numerics_on_a_gpu_that_is_not_there(sets: dict[int, Path]) -> None:
    result = infer_alone(sets[1], "--numerics", "invariant", "--device", "cuda")
    check_failure(result, 78, "no GPU is visible", "--device cpu")


def test_a_missing_shard_file(copied: Path) -> None:
    name = "rank-00001-of-00002.h5"
    (copied / name).unlink()
    check_failure(infer_alone(copied), 74, name, "No such file")


def test_a_damaged_tensor(mpirun: MpiRun, copied: Path) -> None:
    name, tensor = "rank-00001-of-00002.h5", "model.layers.1.mlp.up_proj.weight"
    with h5py.File(copied / name) as file:
        offset = file[tensor].id.get_offset()
    flip(copied / name, offset + 5)
    check_failure(infer(mpirun, 2, copied), 74, "[rank 1/2]", name, f"tensor {tensor} of rank 1 is damaged")


def test_a_file_of_another_set(sets: dict[int, Path], tmp_path: Path) -> None:
    mixed = Path(shutil.copytree(sets[1], tmp_path / "mixed"))
    other = make_sets(save_checkpoint(tmp_path / "model"), tmp_path, 1, strategy="paired")[1]
    name = "rank-00000-of-00001.h5"
    shutil.copy(other / name, mixed / name)
    check_failure(infer_alone(mixed), 74, name, "shard the source again")


def test_no_set_at_all(tmp_path: Path) -> None:
    check_failure(infer_alone(tmp_path / "none"), 74, "no manifest.json", "python -m sharder SOURCE")


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("--output", "cannot write {path}.journal: No such file"), ("--input", "cannot read {path}: No such file")],
)
def test_files_are_opened_before_any_work(mpirun: MpiRun, copied: Path, tmp_path: Path, flag: str, reason: str) -> None:
    """The set is damaged too, but that is not even noticed."""
    rank_file = copied / "rank-00000-of-00002.h5"
    with h5py.File(rank_file) as file:
        offset = file["model.norm.weight"].id.get_offset()
    flip(rank_file, offset)
    path = tmp_path / "missing" / "file.jsonl"
    check_failure(infer(mpirun, 2, copied, flag, path), 74, reason.format(path=path))


def test_a_full_disk_ends_all_ranks(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    result = infer(mpirun, 2, sets[2], "--output", "/dev/full", "--max-new-tokens", "2")
    check_failure(result, 74, "[rank 0/2] cannot write /dev/full: No space left on device")


def test_an_output_that_grows_too_large_leaves_its_records(sets: dict[int, Path], tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(LINE * 50)
    output = tmp_path / "out" / "out.jsonl"
    output.parent.mkdir()
    result = infer_alone(sets[1], "--input", lines, "--output", output, file_size=1000)
    check_failure(result, 74, f"cannot write {output}.journal: File too large")
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl.journal"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-memory", "1K"), ("for 16 tokens", "raise --kv-memory")),
        (("--kv-memory", "1000000T", "--max-batch-size", "1" + "0" * 14), ("does not fit", "lower --kv-memory")),
    ],
)
def test_a_cache_that_memory_does_not_hold(
    sets: dict[int, Path], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    check_failure(infer_alone(sets[1], *flags), 78, *words)


class SlowInput:
    """A named pipe that lines are written to while the job runs. (Some launchers lose what they get on stdin.)"""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR)  # lets no open wait for the other end

    def write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def slow_input(tmp_path: Path) -> SlowInput:
    return SlowInput(tmp_path / "in.jsonl")


def start(mpirun: MpiRun, shards: Path, slow_input: SlowInput, *flags: str) -> subprocess.Popen[str]:
    arguments = ("-m", "mpi_tp.infer", "--shards", shards, "--input", slow_input.path, *flags)
    return mpirun.start(2, *arguments, env=WITHOUT_GPU)


def read_record(process: subprocess.Popen[str]) -> int:
    """Return the id of the next record; a job that gives none in a minute is ended."""
    assert process.stdout is not None
    timer = threading.Timer(60, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    number: int = json.loads(line)["id"]
    return number


def test_lines_are_served_as_they_come(mpirun: MpiRun, sets: dict[int, Path], slow_input: SlowInput) -> None:
    """Between two lines passes more than the stall timeout: rank 0 waits, but it lives."""
    process = start(mpirun, sets[2], slow_input, "--stall-timeout", "3", "--numerics", "fast")
    slow_input.write(LINE)
    assert read_record(process) == 1
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4.5)
    slow_input.write("{bad\n" + LINE)
    assert [read_record(process), read_record(process)] == [2, 3]
    slow_input.write(LINE)
    assert read_record(process) == 4
    slow_input.close()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    assert "4 lines, 1 errors" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(mpirun: MpiRun, sets: dict[int, Path], slow_input: SlowInput, rank: int) -> None:
    process = start(mpirun, sets[2], slow_input)
    slow_input.write(LINE)
    assert read_record(process) == 1
    pids = rank_pids(process.pid)
    assert len(pids) == 2
    os.kill(pids[rank], signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode in (137, 9)  # Open MPI, MPICH
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
    slow_input.close()
