"""The doctor as a user starts it: exit codes, rows, and the failures last."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import h5py
import pytest

from tests.cli.conftest import ROOT, MpiRun
from tests.cli.test_infer_faults import rank_pids
from tests.cli.test_launch import alone, last_words
from tests.support.sets import make_sets, save_checkpoint
from tests.support.shards import flip

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TENSOR = "model.layers.1.mlp.up_proj.weight"

Result = subprocess.CompletedProcess[str]

# Two ranks, of which the second stops before the devices are looked at; with a bound that a test can wait for.
STOPPED = """
import os, signal
from mpi_tp import launch
from mpi_tp.doctor import examination, gpus, panel

panel._GRACE_SECONDS = 2.0
devices_check = gpus.devices_check

def stop_second(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    check = devices_check(world)
    return panel.Check(check.name, lambda: [], check.judge, 2.0)

gpus.devices_check = stop_second
launch.run(lambda job: examination.examine(job.world, None))
"""

# Two ranks that see the same GPU, of which there is none.
ONE_GPU = """
import torch
from types import SimpleNamespace
from mpi_tp.doctor.__main__ import main

torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="8932f937", name="NVIDIA H200")
main([])
"""


ONE_CORE = """
import os
from mpi_tp.doctor.__main__ import main

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
main([])
"""

# Two ranks whose torch differs.
UNEQUAL = """
import sys
from mpi_tp import session
from mpi_tp.infer import main
from mpi_tp.launcher import launched_rank
from os import environ

own = session.versions()
session.versions = lambda: own | {"torch": f"2.1{launched_rank(environ)}"}
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("doctor")
    return make_sets(save_checkpoint(folder / "model"), folder, 2, 3)


def doctor(mpirun: MpiRun, ranks: int, *flags: str | Path) -> Result:
    return mpirun(ranks, "-m", "mpi_tp.doctor", *flags, env=WITHOUT_GPU, timeout=300)


def rows(result: Result) -> dict[str, str]:
    """Return the status of each check, by name."""
    lines = result.stdout.partition("\n\n")[0].splitlines()
    return {line[9:23].strip(): line[:9].strip() for line in lines if not line.startswith(" ")}


def failures(result: Result) -> Sequence[str]:
    """Return what stands last."""
    assert result.returncode == 78, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("failure")]


def test_a_good_set_on_a_cpu_passes(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    result = doctor(mpirun, 2, "--shards", sets[2])
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    found = rows(result)
    assert [name for name, status in found.items() if status == "skipped"] == ["devices", "GPU links"]
    always_ok = {"launcher", "versions", "shard set", "rank count", "memory", "storage", "checksums", "all-reduce"}
    assert {name for name, status in found.items() if status == "ok"} >= always_ok
    assert "failure" not in found.values()


def test_a_flipped_byte_is_named_last(mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(sets[2], tmp_path / "shards"))
    name = "rank-00001-of-00002.h5"
    with h5py.File(copied / name) as file:
        offset = file[TENSOR].id.get_offset()
    flip(copied / name, offset + 5)
    *_, last = failures(result := doctor(mpirun, 2, "--shards", copied))
    assert f"{name}: tensor {TENSOR} of rank 1 is damaged" in last
    assert result.stdout.endswith(last + "\n")
    assert [name for name, status in rows(result).items() if status == "failure"] == ["checksums"]


def test_a_set_for_another_rank_count_is_whole_but_wrong(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    result = doctor(mpirun, 2, "--shards", sets[3])
    assert f"{sets[3]}/ holds 3 ranks but mpirun started 2: use -np 3" in failures(result)[-1]
    assert rows(result)["checksums"] == "ok"


def test_ranks_on_one_core_are_a_warning(mpirun: MpiRun) -> None:
    """Without a set, so the rest is checked."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core")
    result = mpirun(2, "-c", ONE_CORE, env=WITHOUT_GPU, timeout=300)
    assert result.returncode == 0
    found = rows(result)
    assert [found[name] for name in ("core binding", "shard set", "all-reduce")] == ["warning", "skipped", "ok"]
    assert "ranks 0, 1" in result.stdout


def test_two_ranks_on_one_gpu_are_a_failure(mpirun: MpiRun) -> None:
    result = mpirun(2, "-c", ONE_GPU, timeout=300)
    (last,) = set(failures(result))
    assert "devices" in last
    assert "ranks 0, 1 would share a GPU of" in last
    assert [rows(result)[name] for name in ("GPU links", "all-reduce")] == ["skipped"] * 2


def test_a_rank_that_does_not_answer_is_named(mpirun: MpiRun) -> None:
    process = mpirun.start(2, "-c", STOPPED, env=WITHOUT_GPU)
    assert process.stdout is not None
    printed = ""
    while "1 of 3 checks failed" not in printed:  # the last line before the ranks are ended
        line = process.stdout.readline()
        assert line, printed
        printed += line
    for pid in rank_pids(process.pid).values():
        os.kill(pid, signal.SIGCONT)  # a launcher may wait for a stopped process
    _, err = process.communicate(timeout=60)
    assert process.returncode == 78, err
    assert "devices        rank 1: no answer in 2 s: look at the process and its host" in printed
    (words,) = last_words(err)
    assert words.startswith("mpi_tp: [rank 0/2] rank 1 did not answer in time: no further checks were made")


def test_infer_compares_versions_before_it_loads(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    result = mpirun(2, "-c", UNEQUAL, "--shards", sets[2], env=WITHOUT_GPU, timeout=300)
    assert result.returncode == 78
    (line,) = last_words(result.stderr)
    assert re.search(r"rank 1 on \S+ has torch 2\.11, rank 0 on \S+ has 2\.10: start all ranks from one", line)


@pytest.mark.parametrize(
    ("program", "stream", "rank"),
    [("mpi_tp.doctor", "stdout", 0), ("mpi_tp.doctor", "stdout", 1), ("mpi_tp.infer", "stderr", 0)],
)
def test_a_row_of_singletons(program: str, stream: str, rank: int) -> None:
    env = alone(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=str(rank), **WITHOUT_GPU)
    result = subprocess.run(
        [sys.executable, "-m", program], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60
    )
    assert result.returncode == 78
    said = [line for line in getattr(result, stream).splitlines() if "started 2 ranks (SLURM_STEP_NUM_TASKS)" in line]
    assert len(said) == (1 if rank == 0 else 0)


def test_a_missing_set_that_a_file_names_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "doctor.yaml").write_text(f"shards: {tmp_path / 'none'}\n")
    result = subprocess.run(
        [sys.executable, "-m", "mpi_tp.doctor", "--config", tmp_path / "doctor.yaml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=alone(**WITHOUT_GPU),
        timeout=300,
    )
    assert f"{tmp_path / 'none'}/ holds no finished shard set" in failures(result)[-1]
    assert rows(result)["all-reduce"] == "ok"


def test_a_wrong_flag_is_a_wrong_usage(mpirun: MpiRun) -> None:
    assert mpirun(2, "-m", "mpi_tp.doctor", "--nonsense").returncode == 2
