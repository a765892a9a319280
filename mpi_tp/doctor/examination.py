"""The doctor's checks in their order: what is cheap and needs no other rank first, NCCL last."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpi_tp.devices import RankView
from mpi_tp.doctor import cores, files, gpus
from mpi_tp.doctor.cluster import launcher_check, versions_check
from mpi_tp.doctor.fit import memory_check
from mpi_tp.doctor.panel import Panel
from mpi_tp.doctor.rows import Report, skipped
from mpi_tp.shards.reader import ShardSet

if TYPE_CHECKING:
    from mpi4py import MPI

NO_DEVICE = "not every rank has a device of its own"


def examine(world: "MPI.Intracomm", directory: Path | None) -> int:
    """Make all checks of the ranks of `world`, print their rows on rank 0 and return the exit code; collective.

    Raises ConfigurationError if a rank does not answer in time.
    """
    report = Report(sys.stdout if world.rank == 0 else None)
    panel = Panel(world, report)
    places = panel.ask(launcher_check())
    if places is None:
        return report.close()
    hosts = [place.host for place in places]
    panel.ask(versions_check(hosts))
    views = panel.ask(gpus.devices_check(world))
    device = gpus.own_device(views, world.rank) if views else None
    _examine_links(panel, views, device, world.rank)
    panel.ask(cores.binding_check(hosts))
    panel.ask(cores.threads_check(hosts))
    panel.ask(cores.shared_memory_check(hosts))
    _examine_set(panel, directory, hosts, device, world)
    if device is None:
        panel.report("all-reduce", skipped(NO_DEVICE))
    else:
        panel.ask(gpus.sum_check(world, device))
    return report.close()


def _examine_links(panel: Panel, views: Sequence[RankView] | None, device: torch.device | None, rank: int) -> None:
    if views is None or device is None:
        panel.report("GPU links", skipped(NO_DEVICE))
    elif device.type == "cpu":
        panel.report("GPU links", skipped(gpus.NO_GPU))
    else:
        panel.ask(gpus.links_check(views, rank))


def _examine_set(
    panel: Panel, directory: Path | None, hosts: Sequence[str], device: torch.device | None, world: "MPI.Intracomm"
) -> None:
    if directory is None:
        panel.report("shard set", skipped("name one with --shards DIR"))
        return
    if panel.ask(files.set_check(directory)) is None:
        return
    shards = ShardSet.open(directory)
    part = world.rank % shards.ranks
    if panel.ask(files.ranks_check(shards, world.size)) is not None:
        if device is None:
            panel.report("memory", skipped(NO_DEVICE))
        else:
            pool = hosts[world.rank] if device.type == "cpu" else f"rank {world.rank}'s GPU"
            panel.ask(memory_check(shards, pool, part, device))
    panel.ask(files.locking_check(shards, part))
    panel.ask(files.storage_check(shards, part))
    panel.ask(files.checksums_check(shards, world.rank, world.size))
