"""Rows about devices: a GPU for every rank, how they are linked, and that the ranks can add up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.devices import (
    RankView,
    assign_gpus,
    chosen_gpus,
    connect,
    hidden_peers,
    rank_names,
    view_of,
)
from mpi_tp.doctor.links import NO_LINK, find_links
from mpi_tp.doctor.panel import Check
from mpi_tp.doctor.rows import Row, ok, skipped, warning
from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI

NO_GPU = "no GPU is visible: the ranks compute on CPUs"
_SUM_SIZES = (1, 4096, 1 << 22)
"""Numbers in a sum: NCCL has another way for each."""


def devices_check(world: "MPI.Intracomm") -> Check[RankView]:
    """That every rank has a device, and no two the same."""
    return Check("devices", lambda: view_of(world), judge_views)


def judge_views(views: Sequence[RankView]) -> Row:
    """Name the ranks' GPUs. Raises ConfigurationError as `assign_gpus` does."""
    if not any(view.gpus for view in views):
        return skipped(NO_GPU)
    choices = assign_gpus(views, share_gpu=False)
    gpus = chosen_gpus(views, choices)
    table = [
        f"rank {rank}: {gpu.model} {gpu.uuid} of {view.host}"
        for rank, (gpu, view) in enumerate(zip(gpus, views, strict=True))
    ]
    slices = [rank for rank, gpu in enumerate(gpus) if gpu.is_slice]
    if slices and len(views) > 1:
        return warning(
            f"{rank_names(slices)} have MIG slices, between which tensors go through the host: use whole GPUs", *table
        )
    hidden = hidden_peers(views, choices)
    return warning(hidden, *table) if hidden else ok("each rank has a GPU of its own", *table)


def own_device(views: Sequence[RankView], rank: int) -> torch.device | None:
    """Return a rank's device as a job would choose it, None if a job would be refused."""
    if not any(view.gpus for view in views):
        return torch.device("cpu")
    try:
        return torch.device("cuda", assign_gpus(views, share_gpu=False)[rank])
    except ConfigurationError:  # the row of the devices says why
        return None


def links_check(views: Sequence[RankView], rank: int) -> Check[list[str]]:
    """How the GPUs of one host reach each other."""
    hosts = [view.host for view in views]

    def probe() -> list[str]:
        gpus = chosen_gpus(views, assign_gpus(views, share_gpu=False))
        near = [gpu if host == hosts[rank] else None for gpu, host in zip(gpus, hosts, strict=True)]
        return find_links(rank, near, views[rank].gpus)

    return Check("GPU links", probe, lambda by_rank: judge_links(hosts, by_rank))


def judge_links(hosts: Sequence[str], by_rank: Sequence[Sequence[str]]) -> Row:
    """Show the matrix, in which `by_rank[a][b]` is the way from rank a's GPU to rank b's."""
    pairs = [(a, b) for a, row in enumerate(by_rank) for b in range(len(row)) if a != b and hosts[a] == hosts[b]]
    if not pairs:
        return ok("no host has two of the GPUs")
    table = matrix(by_rank)
    apart = [(a, b) for a, b in pairs if by_rank[a][b] == NO_LINK]
    if apart:
        a, b = apart[0]
        return warning(
            f"the GPUs of ranks {a} and {b} on {hosts[a]} do not reach each other and send through host memory: see "
            "nvidia-smi topo -p2p r",
            *table,
        )
    return ok(f"the GPUs of a host are linked by {', '.join(sorted({by_rank[a][b] for a, b in pairs}))}", *table)


def matrix(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of the links from rank to rank."""
    names = [f"rank {rank}" for rank in range(len(by_rank))]
    cells = [["", *names], *([name, *row] for name, row in zip(names, by_rank, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def sum_check(world: "MPI.Intracomm", device: torch.device) -> Check[str]:
    """That an all-reduce, by what a job would use, gives the right sum: the first use of NCCL, bounded in time."""
    sizes = ", ".join(f"{size:,}" for size in _SUM_SIZES)

    def judge(by_rank: Sequence[str]) -> Row:
        return ok(f"sums of {sizes} numbers over {len(by_rank)} rank(s) are right, by {by_rank[0]}")

    return Check("all-reduce", lambda: add_up(connect(world, "auto", device, share_gpu=False), device), judge, 120.0)


def add_up(comm: Communicator, device: torch.device) -> str:
    """Add numbers of all ranks and return what did it. Raises ConfigurationError for a wrong sum."""
    expected = comm.size * (comm.size + 1) // 2
    for size in _SUM_SIZES:
        total = comm.all_reduce(torch.full((size,), comm.rank + 1.0, device=device))
        wrong = int((total != expected).sum())
        if wrong:
            raise ConfigurationError(
                f"{wrong} of {size} sums over {comm.size} ranks are wrong, such as "
                f"{float(total[total != expected][0]):g} instead of {expected}: look at the links (nvidia-smi nvlink "
                "-e, dmesg), or send through the host with --comm mpi"
            )
    return type(comm).__name__.removesuffix("Communicator")
