"""Which device a rank computes on, and what it talks to the other ranks through."""

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator, split_by_host
from mpi_tp.comm.nccl import NcclCommunicator
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one (MIG), by a name that no other in the world has, and its model."""

    uuid: str
    model: str

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG instance."""
        return " MIG " in self.model


@dataclass(frozen=True)
class RankView:
    """Where one rank runs: its host, its number among the ranks there, and the GPUs that it sees, in torch's order."""

    host: str
    local_rank: int
    gpus: tuple[Gpu, ...]


def choose_device(mpi_comm: "MPI.Intracomm", wanted: Literal["auto", "cuda", "cpu"], share_gpu: bool) -> torch.device:
    """Return this rank's device and make it torch's current one; collective. All ranks get the same type.

    "auto" is a GPU if all ranks see one, the CPU if none does. Rank 0 warns, on stderr, of GPUs that a launcher has
    hidden from their peers. Raises `ConfigurationError`, on all ranks alike, if GPUs are missing on some hosts, or if
    two ranks had to share one without `share_gpu`.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    views: list[RankView] = mpi_comm.allgather(view_of(mpi_comm))
    if wanted == "auto" and not any(view.gpus for view in views):
        return torch.device("cpu")
    choices = assign_gpus(views, share_gpu)
    hidden = hidden_peers(views, choices)
    if hidden and mpi_comm.rank == 0:
        print(f"mpi_tp: warning: {hidden}", file=sys.stderr)
    device = torch.device("cuda", choices[mpi_comm.rank])
    torch.cuda.set_device(device)
    return device


def view_of(mpi_comm: "MPI.Intracomm") -> RankView:
    """Return what this rank sees; collective."""
    host = split_by_host(mpi_comm)
    local_rank: int = host.rank
    host.Free()
    return RankView(socket.gethostname(), local_rank, visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", "")))


def visible_gpus(visible_devices: str) -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees; `visible_devices` is the variable that the launcher may have set.

    It holds indices, UUIDs or MIG names. CUDA shows a process one MIG instance, the first that is named there; its
    UUID may be that of the whole GPU.
    """
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(torch.device("cuda", index))
        named = visible_devices.split(",")[0].strip()
        uuid = named if named.startswith("MIG-") else str(properties.uuid)
        gpus.append(Gpu(uuid, properties.name))
    return tuple(gpus)


def assign_gpus(views: Sequence[RankView], share_gpu: bool) -> list[int]:
    """Return, for each rank, which of the GPUs that it sees it takes: by local rank, where that one is free.

    A launcher may bind each rank to a GPU of its own, which all of them then see as the first.
    Raises `ConfigurationError` if a rank sees none, or if two had to share one without `share_gpu`.
    """
    blind = [rank for rank, view in enumerate(views) if not view.gpus]
    if blind:
        raise ConfigurationError(
            f"no GPU is visible on {by_host(views, blind)}: ask for GPUs on every host, or run with --device cpu"
        )
    choices = [0] * len(views)
    taken: set[str] = set()
    # Who sees few chooses first: a rank that sees more can take what is left.
    for rank in sorted(range(len(views)), key=lambda rank: len(views[rank].gpus)):
        gpus, start = views[rank].gpus, views[rank].local_rank
        in_turn = [(start + step) % len(gpus) for step in range(len(gpus))]
        choices[rank] = next((index for index in in_turn if gpus[index].uuid not in taken), in_turn[0])
        taken.add(gpus[choices[rank]].uuid)
    shared = ranks_by_gpu(chosen_gpus(views, choices))
    if shared and not share_gpu:
        raise ConfigurationError(_refuse_sharing(views, next(iter(shared.values()))))
    return choices


def chosen_gpus(views: Sequence[RankView], choices: Sequence[int]) -> list[Gpu]:
    """Return each rank's GPU."""
    return [view.gpus[choice] for view, choice in zip(views, choices, strict=True)]


def ranks_by_gpu(gpus: Iterable[Gpu]) -> dict[str, list[int]]:
    """Return the ranks of every GPU that has more than one; `gpus` in rank order."""
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.uuid, []).append(rank)
    return {uuid: sharing for uuid, sharing in ranks.items() if len(sharing) > 1}


def hidden_peers(views: Sequence[RankView], choices: Sequence[int]) -> str | None:
    """Say which ranks do not see the GPUs of others on their host, as when a launcher binds each to its own.

    NCCL and MPI then miss fast paths between these GPUs without a word (NVIDIA/nccl#1066).
    """
    chosen = chosen_gpus(views, choices)
    hiding = [
        rank
        for rank, view in enumerate(views)
        if any(view.host == other.host and gpu not in view.gpus for other, gpu in zip(views, chosen, strict=True))
    ]
    if not hiding:
        return None
    return (
        f"the GPUs of other ranks are hidden from the ranks on {by_host(views, hiding)}: NCCL may miss NVLink between "
        "them: ask Slurm for --gpus-per-node (or --gpu-bind=none) instead of --gpus-per-task"
    )


def by_host(views: Sequence[RankView], ranks: Iterable[int]) -> str:
    """Name the hosts of some ranks, with them: "node0 (ranks 0, 1), node1 (ranks 2, 3)"."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(views[rank].host, []).append(rank)
    return ", ".join(f"{host} ({rank_names(own)})" for host, own in hosts.items())


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1, 3" or "ranks 0-7", for people; `ranks` ascend."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def connect(
    mpi_comm: "MPI.Intracomm", comm: Literal["auto", "nccl", "mpi"], device: torch.device, share_gpu: bool
) -> Communicator:
    """Return a communicator of the ranks of `mpi_comm` for tensors on `device`; collective.

    "auto" is NCCL between GPUs and MPI between CPUs, and between slices of GPUs, which NCCL does not support before
    version 2.32. Raises `ConfigurationError` if NCCL is wanted but cannot work.
    """
    if mpi_comm.size == 1:
        return SingleCommunicator()
    if comm == "nccl" and device.type != "cuda":
        raise ConfigurationError(f"--comm nccl needs GPUs, but the ranks run on the {device.type}: use --comm mpi")
    if comm == "mpi" or device.type != "cuda":
        return MpiCommunicator(mpi_comm.Dup())
    gpus = _all_gpus(mpi_comm, device)
    if comm == "auto" and any(gpu.is_slice for gpu in gpus):
        return MpiCommunicator(mpi_comm.Dup())
    return NcclCommunicator.create(mpi_comm.Dup(), device, share_gpu and bool(ranks_by_gpu(gpus)))


def ranks_sharing(mpi_comm: "MPI.Intracomm", device: torch.device) -> int:
    """Return how many ranks share this rank's memory: those of its host on a CPU, those of its GPU; collective."""
    if device.type == "cpu":
        host = split_by_host(mpi_comm)
        size: int = host.size
        host.Free()
        return size
    sharers = ranks_by_gpu(_all_gpus(mpi_comm, device)).values()
    return next((len(ranks) for ranks in sharers if mpi_comm.rank in ranks), 1)


def _all_gpus(mpi_comm: "MPI.Intracomm", device: torch.device) -> list[Gpu]:
    """Return the GPU of each rank; collective."""
    own = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))[device.index]
    gpus: list[Gpu] = mpi_comm.allgather(own)
    return gpus


def _refuse_sharing(views: Sequence[RankView], ranks: Sequence[int]) -> str:
    view = views[ranks[0]]
    on_host = sum(other.host == view.host for other in views)
    return (
        f"{rank_names(ranks)} would share a GPU of {view.host}, which has {on_host} ranks and shows them "
        f"{len(view.gpus)} GPU(s): start at most one rank a GPU, or share them, slowly, with --share-gpu"
    )
