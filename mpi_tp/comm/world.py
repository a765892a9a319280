"""The start and the end of MPI itself, and what all its ranks ask each other.

mpi4py keeps Python's lock in both, so that no thread could end a process that waits in them for a rank that never
comes. Called through ctypes, they let threads run.
"""

import ctypes
from typing import TYPE_CHECKING, TypeVar

from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def start_mpi() -> "MPI.Intracomm":
    """Start MPI, for calls from several threads, and return all ranks; collective.

    Raises ConfigurationError if there is no MPI, or if it does not start.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f'mpi4py finds no MPI ({error}): load your site\'s MPI module, or pip install "mpi-tp[mpi]"'
        ) from error
    if not MPI.Is_initialized():
        provided = ctypes.c_int()
        code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        if code:
            raise ConfigurationError(f"MPI does not start (error {code}): look at what it says above")
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py would have: errors become exceptions
    return MPI.COMM_WORLD


def all_gather_object(mpi_comm: "MPI.Intracomm", value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank. A rank that stalls in here waits for others."""
    return mpi_comm.allgather(value)


def end_mpi() -> None:
    """End MPI, which nobody may use afterwards; collective."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        ctypes.CDLL(MPI.__file__).MPI_Finalize()
