"""How a run went: the last line on stderr, and the record beside the output by which it can be repeated."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mpi_tp.comm.world import all_gather_object
from mpi_tp.infer_options import InferOptions
from mpi_tp.memory import peak_bytes
from mpi_tp.session import Session
from mpi_tp.versions import versions


class Figures(Protocol):
    """What a job did: attributes of plain values."""

    def summary(self, start_seconds: float) -> str:
        """Return the figures for people; `start_seconds` is how long the job took to begin."""
        ...


@dataclass(frozen=True)
class RankReport:
    """One rank's figures; memory in bytes, on the device the model ran on."""

    host: str
    device: str
    loaded_bytes: int
    load_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class RunReport:
    """All ranks' figures and what the job did; `start_seconds` is from the program's start to the first input."""

    set_id: str
    replicas: int
    start_seconds: float
    ranks: list[RankReport]
    figures: Figures

    def summary(self) -> str:
        """Return the figures as one line."""
        load_seconds = max(rank.load_seconds for rank in self.ranks)
        loaded = sum(rank.loaded_bytes for rank in self.ranks)
        peak = max(rank.peak_bytes for rank in self.ranks)
        return (
            f"mpi_tp: {self.figures.summary(self.start_seconds)}; "
            f"load {load_seconds:.2f} s, {loaded / load_seconds / 1e6:.0f} MB/s; "
            f"peak memory {peak / 2**20:.0f} MiB a rank"
        )

    def facts(self, options: InferOptions) -> dict[str, Any]:
        """Return everything that `FILE.meta.json` holds."""
        return {
            "set_id": self.set_id,
            "versions": versions(),
            "options": {name: _plain(value) for name, value in asdict(options).items()},
            "job_id": os.environ.get("SLURM_JOB_ID"),
            "replicas": self.replicas,
            "ranks": [asdict(rank) for rank in self.ranks],
            "start_seconds": self.start_seconds,
            "figures": vars(self.figures),
        }


def seconds_since_start() -> float:
    """Return the seconds since this process began, imports and the start of MPI with them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def gather_report(session: Session, start_seconds: float, figures: Figures | None) -> RunReport | None:
    """Return the report on rank 0, which alone has `figures`; None on the others; collective."""
    assert session.shards is not None, "a report names the set"
    mine = RankReport(
        host=socket.gethostname(),
        device=device_name(session.device),
        loaded_bytes=session.load_figures.num_bytes,
        load_seconds=session.load_figures.seconds,
        peak_bytes=peak_bytes(session.device),
    )
    with session.job.phase("gathering figures"):
        ranks = all_gather_object(session.job.world, mine)
    return RunReport(session.shards.set_id, session.replicas.count, start_seconds, ranks, figures) if figures else None


def device_name(device: torch.device) -> str:
    """Return what tells this device from any other of its host."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def _plain(value: object) -> object:
    """Return an option as JSON can hold it."""
    if isinstance(value, Mapping | str | int | float | None):
        return value
    return str(value)
