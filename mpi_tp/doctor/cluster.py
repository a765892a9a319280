"""Rows about the launcher and the software: where the ranks are, and that they are of one kind."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpi_tp.comm.mpi import library_version as mpi_version
from mpi_tp.comm.nccl import library_version as nccl_version
from mpi_tp.devices import rank_names
from mpi_tp.doctor.panel import Check
from mpi_tp.doctor.rows import Row, ok
from mpi_tp.versions import check_same_versions, versions

_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun or srun", "SLURM_STEP_NUM_TASKS": "srun"}


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what started it."""

    host: str
    launcher: str


def launcher_check() -> Check[Place]:
    """That there is one world; which ranks are where."""
    return Check("launcher", find_place, judge_places, seconds=20.0)


def find_place() -> Place:
    """Return this rank's place."""
    launcher = next((launcher for name, launcher in _LAUNCHERS.items() if name in os.environ), "no launcher")
    return Place(socket.gethostname(), launcher)


def judge_places(places: Sequence[Place]) -> Row:
    """Name the hosts with their ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    where = ", ".join(f"{host} ({rank_names(ranks)})" for host, ranks in hosts.items())
    return ok(f"one world of {len(places)} rank(s), from {places[0].launcher}, on {len(hosts)} host(s): {where}")


def versions_check(hosts: Sequence[str]) -> Check[dict[str, str]]:
    """That all ranks run the same software; `hosts` are theirs."""

    def judge(by_rank: Sequence[Mapping[str, str]]) -> Row:
        check_same_versions(hosts, by_rank)
        return ok("the same on all ranks: " + ", ".join(f"{name} {text}" for name, text in by_rank[0].items()))

    return Check("versions", find_versions, judge)


def find_versions() -> dict[str, str]:
    """Return the versions of this rank's software, libraries and driver included."""
    found = versions() | {"MPI": mpi_version()}
    if torch.version.cuda:
        found |= {"CUDA": torch.version.cuda, "NCCL": nccl_version()}
        found["driver"] = driver_version(Path("/proc/driver/nvidia/version"))
    return found


def driver_version(path: Path) -> str:
    """Return the version of the NVIDIA driver by the file in which it tells it, "none" without one."""
    if not path.exists():
        return "none"
    numbers = re.search(r"\d+\.\d+[.\d]*", path.read_text())
    return numbers[0] if numbers else "unknown"
