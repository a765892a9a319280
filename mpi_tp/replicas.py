"""How the ranks of a job divide into replicas of a model, each of which is split over its ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mpi_tp.comm.base import Mail
from mpi_tp.comm.mail import MpiMail
from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Replicas:
    """The replicas of a job, as one rank sees them."""

    count: int
    index: int
    """Which one this rank is part of."""
    ranks: "MPI.Intracomm"
    """The ranks of that one."""
    mail: Mail | None
    """Between the first ranks of all replicas; None on other ranks, and if there is one replica only."""


def check_multiple(size: int, ranks: int) -> None:
    """Raise ConfigurationError if `size` ranks are no whole number of replicas of `ranks` ranks each."""
    if size % ranks:
        raise ConfigurationError(
            f"--tensor-parallel is {ranks} but mpirun started {size} ranks: use -np {ranks} or a multiple of it"
        )


def divide(world: "MPI.Intracomm", ranks: int) -> Replicas:
    """Make replicas of `ranks` consecutive ranks each, which `world` is a multiple of; collective.

    Launchers number the ranks host by host, so that most replicas lie within one.
    """
    assert world.size % ranks == 0, f"{world.size} ranks in replicas of {ranks}"
    if world.size == ranks:
        return Replicas(1, 0, world, None)
    index, rank = divmod(world.rank, ranks)
    own, peers = (cast("MPI.Intracomm", world.Split(color, world.rank)) for color in (index, rank))
    return Replicas(world.size // ranks, index, own, MpiMail(peers) if rank == 0 else None)
