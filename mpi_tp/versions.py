"""The versions of what a result may depend on, and whether all ranks have the same."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from mpi_tp import __version__
from mpi_tp.errors import ConfigurationError

PACKAGES = ("torch", "mpi4py", "numpy", "h5py", "numba", "tokenizers")


def versions() -> dict[str, str]:
    """Return this process's versions by name."""
    own = {"mpi-tp": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in PACKAGES}


def check_same_versions(hosts: Sequence[str], by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise `ConfigurationError` for the first thing that some rank has in another version than rank 0.

    `hosts` and `by_rank` are in rank order; all ranks name the same things.
    """
    for name, expected in by_rank[0].items():
        for rank, found in enumerate(by_rank):
            if found[name] != expected:
                raise ConfigurationError(
                    f"rank {rank} on {hosts[rank]} has {name} {found[name]}, rank 0 on {hosts[0]} has {expected}: "
                    "start all ranks from one environment"
                )
