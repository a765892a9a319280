"""MPI-launched tensor-parallel inference from per-rank HDF5 shard files."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from mpi_tp.engine.request import SamplingParams
    from mpi_tp.llm import LLM


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first asked for: the package alone needs no torch."""
    if name == "LLM":
        from mpi_tp.llm import LLM

        return LLM
    if name == "SamplingParams":
        from mpi_tp.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
