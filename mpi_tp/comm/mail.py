"""Mail between ranks over MPI."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

_SHORTEST_SLEEP = 50e-6
_LONGEST_SLEEP = 2e-3


class MpiMail:
    """Mail between the ranks of an mpi4py communicator, which nobody else may use.

    It neither blocks nor spins: the cores belong to the ranks that compute.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self._mpi = mpi_comm
        self._make_status = MPI.Status
        self._leaving: list[MPI.Request] = []
        self._arriving: list[tuple[int, MPI.Request]] = []

    def send(self, value: Any, dst: int) -> None:
        """Send to rank `dst`; returns at once."""
        self._leaving = [request for request in self._leaving if not request.Test()]
        self._leaving.append(self._mpi.isend(value, dst))

    def receive(self, wait_seconds: float = 0.0) -> list[tuple[int, Any]]:
        """Return what has arrived, each with the rank that sent it, in the order of its sending.

        If nothing has, sleep until something has or `wait_seconds` have passed.
        """
        arrived = self._arrived()
        deadline = time.monotonic() + wait_seconds
        pause = _SHORTEST_SLEEP
        while not arrived and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_SLEEP)
            arrived = self._arrived()
        return arrived

    def _arrived(self) -> list[tuple[int, Any]]:
        status = self._make_status()
        while message := self._mpi.improbe(status=status):
            # A large one comes only while its sender calls MPI too, which may be a step later.
            self._arriving.append((status.source, message.irecv()))
        arrived, still_arriving, late = [], [], set()
        for source, request in self._arriving:
            is_here, value = (False, None) if source in late else request.test()
            if is_here:
                arrived.append((source, value))
            else:
                late.add(source)
                still_arriving.append((source, request))
        self._arriving = still_arriving
        return arrived
