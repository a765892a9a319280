"""How a run went: the last line on stderr, and the record beside the output by which it can be repeated."""

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from mpi_tp import __version__
from mpi_tp.batch import BatchFigures
from mpi_tp.infer_options import InferOptions
from mpi_tp.memory import peak_bytes
from mpi_tp.session import Session

PACKAGES = ("torch", "mpi4py", "numpy", "h5py", "numba", "tokenizers")


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
    """All ranks' figures and what the batch did; `start_seconds` is from the program's start to the first line."""

    set_id: str
    start_seconds: float
    ranks: list[RankReport]
    figures: BatchFigures

    def summary(self) -> str:
        """Return the figures as one line."""
        figures, load_seconds = self.figures, max(rank.load_seconds for rank in self.ranks)
        loaded = sum(rank.loaded_bytes for rank in self.ranks)
        first = figures.first_token_seconds
        peak = max(rank.peak_bytes for rank in self.ranks)
        return (
            f"mpi_tp: {figures.num_lines} lines, {figures.num_errors} errors, {figures.completion_tokens} tokens, "
            f"{figures.completion_tokens / max(figures.seconds, 1e-9):.1f} tokens/s; "
            f"first token after {'-' if first is None else f'{self.start_seconds + first:.2f} s'}; "
            f"load {load_seconds:.2f} s, {loaded / load_seconds / 1e6:.0f} MB/s; "
            f"peak memory {peak / 2**20:.0f} MiB a rank"
        )

    def facts(self, options: InferOptions) -> dict[str, Any]:
        """Return everything that `FILE.meta.json` holds."""
        return {
            "set_id": self.set_id,
            "versions": {
                "mpi-tp": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
            },
            "options": {name: _plain(value) for name, value in asdict(options).items()},
            "job_id": os.environ.get("SLURM_JOB_ID"),
            "ranks": [asdict(rank) for rank in self.ranks],
            "start_seconds": self.start_seconds,
            "figures": asdict(self.figures),
        }


def gather_report(session: Session, start_seconds: float, figures: BatchFigures | None) -> RunReport | None:
    """Return the report on rank 0, which alone has batch figures; None on the others; collective."""
    mine = RankReport(
        host=socket.gethostname(),
        device=_device_name(session.device),
        loaded_bytes=session.load_figures.num_bytes,
        load_seconds=session.load_figures.seconds,
        peak_bytes=peak_bytes(session.device),
    )
    ranks = session.comm.all_gather_object(mine)
    return RunReport(session.shards.set_id, start_seconds, ranks, figures) if figures else None


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def _plain(value: object) -> object:
    """Return an option as JSON can hold it."""
    if isinstance(value, Mapping | str | int | float | None):
        return value
    return str(value)
