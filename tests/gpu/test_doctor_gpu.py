"""The doctor on real GPUs: one for each rank, or one for all of them, which is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpi_tp.devices import Gpu, visible_gpus
from mpi_tp.doctor import links
from mpi_tp.doctor.examination import examine
from mpi_tp.memory import available_bytes
from tests.support.mpi_session import WORLD
from tests.support.sets import make_sets, save_checkpoint

ON_ONE_GPU = WORLD.size > 1 and torch.cuda.device_count() < WORLD.size
gpu_each = pytest.mark.skipif(ON_ONE_GPU, reason="fewer GPUs than ranks")


def nvidia_smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def rows(capfd: pytest.CaptureFixture[str], directory: Path | None, code: int) -> dict[str, str]:
    """Examine all ranks; return rank 0's rows by name, on the others nothing."""
    assert examine(WORLD, directory) == code
    lines = capfd.readouterr().out.partition("\n\n")[0].splitlines()
    return {line[9:23].strip(): f"{line[:9].strip()}: {line[24:]}" for line in lines if not line.startswith(" ")}


@gpu_each
def test_a_gpu_for_each_rank(capfd: pytest.CaptureFixture[str]) -> None:
    found = rows(capfd, None, 0)
    if WORLD.rank == 0:
        assert found["devices"] == "ok: each rank has a GPU of its own"
        assert f"driver {nvidia_smi('driver_version')[0]}" in found["versions"]
        assert found["GPU links"].startswith("ok: ")
        assert found["all-reduce"].startswith("ok: ")
        assert found["all-reduce"].endswith("by Single" if WORLD.size == 1 else "by Nccl")


@gpu_each
def test_a_set_fits_the_gpus(capfd: pytest.CaptureFixture[str], shared_tmp_path: Path) -> None:
    if WORLD.rank == 0:
        make_sets(save_checkpoint(shared_tmp_path / "model"), shared_tmp_path, WORLD.size)
    WORLD.Barrier()
    found = rows(capfd, shared_tmp_path / f"shards-{WORLD.size}", 0)
    if WORLD.rank == 0:
        assert "'s GPU and " in found["memory"]
        assert found["checksums"].startswith("ok: ")


@pytest.mark.skipif(not ON_ONE_GPU, reason="about several ranks on one GPU")
def test_several_ranks_on_one_gpu_are_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    found = rows(capfd, None, 78)
    if WORLD.rank == 0:
        assert found["devices"].startswith("failure: ranks 0")
        assert "would share a GPU of" in found["devices"]
        assert found["GPU links"].startswith("skipped: ")
        assert found["all-reduce"].startswith("skipped: ")


def test_gpus_are_known_by_their_uuids() -> None:
    assert {f"GPU-{gpu.uuid}" for gpu in visible_gpus("")} <= set(nvidia_smi("uuid"))
    assert not any(gpu.is_slice for gpu in visible_gpus(""))


def test_nvml_knows_what_torch_sees() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpus = visible_gpus("")
    ways = links.find_links(0, gpus, gpus)
    assert ways[0] == "-"
    assert "hidden" not in ways
    assert links.find_links(0, [gpus[0], Gpu("GPU-of-nobody", "H200")], gpus)[1] == "hidden"


def test_nvml_and_cuda_agree_on_links(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpus = visible_gpus("")
    by_nvml = links.find_links(0, gpus, gpus)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    by_cuda = links.find_links(0, gpus, gpus)
    assert [way == links.NO_LINK for way in by_nvml] == [way == links.NO_LINK for way in by_cuda]


def test_free_memory_is_that_of_the_device() -> None:
    device = torch.device("cuda", 0)
    assert 0 < available_bytes(device) <= torch.cuda.get_device_properties(device).total_memory
