"""Which device a rank computes on, and what it talks to the other ranks through."""

import socket
from collections import Counter
from typing import TYPE_CHECKING, Literal

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator, split_by_host
from mpi_tp.comm.nccl import NcclCommunicator
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI


def choose_device(mpi_comm: "MPI.Intracomm", wanted: Literal["auto", "cuda", "cpu"], share_gpu: bool) -> torch.device:
    """Return this rank's device and make it torch's current one; collective. All ranks get the same type.

    "auto" is a GPU if all ranks see one, the CPU if none does. Raises `ConfigurationError`, on all ranks alike, if GPUs
    are missing on some hosts, or if two ranks had to share one without `share_gpu`.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    by_rank: list[tuple[str, int]] = mpi_comm.allgather((socket.gethostname(), visible))
    if wanted == "auto" and not any(count for _, count in by_rank):
        return torch.device("cpu")
    without = sorted({host for host, count in by_rank if not count})
    if without:
        raise ConfigurationError(
            f"no GPU is visible on {', '.join(without)}: ask for GPUs on every host, or run with --device cpu"
        )
    local_rank = split_by_host(mpi_comm).rank
    device = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(device)
    shared = _ranks_by_gpu(mpi_comm, device)
    if shared and not share_gpu:
        raise ConfigurationError(_refuse_sharing(shared, by_rank))
    return device


def connect(
    mpi_comm: "MPI.Intracomm", comm: Literal["auto", "nccl", "mpi"], device: torch.device, share_gpu: bool
) -> Communicator:
    """Return a communicator of the ranks of `mpi_comm` for tensors on `device`; collective.

    "auto" is NCCL between GPUs and MPI between CPUs. Raises `ConfigurationError` if NCCL is wanted but cannot work.
    """
    if mpi_comm.size == 1:
        return SingleCommunicator()
    if comm == "nccl" and device.type != "cuda":
        raise ConfigurationError(f"--comm nccl needs GPUs, but the ranks run on the {device.type}: use --comm mpi")
    if comm == "mpi" or device.type != "cuda":
        return MpiCommunicator(mpi_comm.Dup())
    shared = _ranks_by_gpu(mpi_comm, device)
    return NcclCommunicator.create(mpi_comm.Dup(), device, share_gpu and bool(shared))


def ranks_sharing(mpi_comm: "MPI.Intracomm", device: torch.device) -> int:
    """Return how many ranks share this rank's memory: those of its host on a CPU, those of its GPU; collective."""
    if device.type == "cpu":
        host = split_by_host(mpi_comm)
        size: int = host.size
        host.Free()
        return size
    sharers = _ranks_by_gpu(mpi_comm, device).values()
    return next((len(ranks) for ranks in sharers if mpi_comm.rank in ranks), 1)


def _ranks_by_gpu(mpi_comm: "MPI.Intracomm", device: torch.device) -> dict[str, list[int]]:
    """Return the ranks of every GPU that has more than one; collective.

    By UUID: a launcher may bind each rank to its own GPU, which is then called cuda:0 by all of them.
    """
    uuids: list[str] = mpi_comm.allgather(str(torch.cuda.get_device_properties(device).uuid))
    count = Counter(uuids)
    return {uuid: [r for r, own in enumerate(uuids) if own == uuid] for uuid in count if count[uuid] > 1}


def _refuse_sharing(shared: dict[str, list[int]], by_rank: list[tuple[str, int]]) -> str:
    ranks = next(iter(shared.values()))
    host, visible = by_rank[ranks[0]]
    on_host = sum(name == host for name, _ in by_rank)
    return (
        f"ranks {', '.join(map(str, ranks))} would share a GPU of {host}, which has {on_host} ranks and shows them "
        f"{visible} GPU(s): start at most one rank a GPU, or share them, slowly, with --share-gpu"
    )
