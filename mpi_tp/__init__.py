"""MPI-launched tensor-parallel inference from per-rank HDF5 shard files."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Outcome", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from mpi_tp.engine.engine import Outcome
    from mpi_tp.engine.request import Completion, SamplingParams
    from mpi_tp.llm import LLM

_HOMES = {
    "LLM": "mpi_tp.llm",
    "Completion": "mpi_tp.engine.request",
    "Outcome": "mpi_tp.engine.engine",
    "SamplingParams": "mpi_tp.engine.request",
}


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first asked for: the package alone needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
