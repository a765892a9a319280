"""Choice of device and communicator, with GPUs that are only pretended."""

import sys
from dataclasses import dataclass

import pytest
import torch
from mpi4py import MPI

from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.devices import choose_device, connect
from mpi_tp.errors import ConfigurationError

WORLD = MPI.COMM_WORLD
several_ranks = pytest.mark.skipif(WORLD.size == 1, reason="about ranks that differ: start under mpirun -np 2")


@dataclass(frozen=True)
class Properties:
    uuid: str
    name: str


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, uuid: str = "GPU-{index}", name: str = "H200") -> None:
    """Let this rank see `count` GPUs; `uuid` may mention {index}, as this rank sees it, and {rank}."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: Properties(uuid.format(index=device.index, rank=WORLD.rank), name),
    )


def test_no_gpu_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    assert choose_device(WORLD, "auto", share_gpu=False) == torch.device("cpu")


def test_cpu_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8)
    assert choose_device(WORLD, "cpu", share_gpu=False) == torch.device("cpu")


def test_a_wanted_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0)
    with pytest.raises(ConfigurationError, match=r"no GPU is visible on .*--device cpu"):
        choose_device(WORLD, "cuda", share_gpu=False)


def test_each_rank_of_a_host_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8)
    assert choose_device(WORLD, "auto", share_gpu=False) == torch.device("cuda", WORLD.rank)


def test_a_launcher_may_have_bound_each_rank_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, "GPU-of-{rank}")
    assert choose_device(WORLD, "cuda", share_gpu=False) == torch.device("cuda", 0)


@several_ranks
def test_one_gpu_is_shared_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    with pytest.raises(ConfigurationError, match=r"ranks 0(, 1|-2|-3) would share a GPU .*--share-gpu"):
        choose_device(WORLD, "auto", share_gpu=False)
    assert choose_device(WORLD, "auto", share_gpu=True) == torch.device("cuda", 0)


@several_ranks
def test_gpus_on_some_hosts_only_are_refused_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, WORLD.rank)
    monkeypatch.setattr("socket.gethostname", lambda: f"node{WORLD.rank}")
    with pytest.raises(ConfigurationError, match=r"no GPU is visible on node0 \(rank 0\): "):
        choose_device(WORLD, "auto", share_gpu=False)


def test_cpu_ranks_talk_by_mpi() -> None:
    comm = connect(WORLD, "auto", torch.device("cpu"), share_gpu=False)
    assert (comm.rank, comm.size) == (WORLD.rank, WORLD.size)
    assert isinstance(comm, SingleCommunicator if WORLD.size == 1 else MpiCommunicator)


@several_ranks
def test_nccl_between_cpus_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="--comm nccl needs GPUs, but the ranks run on the cpu: use --comm mpi"
    ):
        connect(WORLD, "nccl", torch.device("cpu"), share_gpu=False)


@several_ranks
def test_a_missing_nccl4py_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(ConfigurationError, match=r"nccl4py .*pip install \"mpi-tp\[gpu\]\".*--comm mpi"):
        connect(WORLD, "auto", torch.device("cuda", WORLD.rank), share_gpu=False)


@several_ranks
def test_slices_of_gpus_talk_by_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1, "GPU-0", "A100 MIG 1g.5gb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-{WORLD.rank}")
    device = choose_device(WORLD, "auto", share_gpu=False)
    assert isinstance(connect(WORLD, "auto", device, share_gpu=False), MpiCommunicator)
