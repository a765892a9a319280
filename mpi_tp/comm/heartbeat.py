"""A ring in which every rank hears, now and then, that the one before it lives."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_WORD_BYTES = 256
_GOODBYE = b"\0" * _WORD_BYTES


class Heartbeat:
    """One rank's place in the ring; made on all ranks, `mpi_comm` is nobody else's.

    Messages are small and never waited for, so that a thread can send them whatever the main thread does, in a program
    whose MPI takes calls from several threads.
    """

    def __init__(self, mpi_comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.neighbour = (mpi_comm.rank - 1) % mpi_comm.size
        """The rank that this one hears from."""
        self._next = (mpi_comm.rank + 1) % mpi_comm.size
        self._mpi = mpi_comm
        self._outbox = bytearray(_WORD_BYTES)
        self._inbox = bytearray(_WORD_BYTES)
        self._sending: MPI.Request = MPI.REQUEST_NULL
        self._receiving = mpi_comm.Irecv(self._inbox, self.neighbour)
        self._errors = MPI.Exception
        self._is_closed = False
        self._turn = threading.Lock()  # the thread that beats, or the one that closes

    def beat(self, word: str) -> str | None:
        """Send `word`, cut to what a message holds; return the neighbour's latest, None if there is no new one.

        Raises ConnectionError if MPI fails.
        """
        with self._turn:
            if self._is_closed:
                return ""
            try:
                return self._exchange(word)
            except self._errors as error:
                raise ConnectionError(f"MPI: {error}") from error

    def close(self) -> None:
        """Wait until both neighbours are done with this rank; collective."""
        with self._turn:
            self._is_closed = True
        self._sending.Wait()
        goodbye = self._mpi.Isend(_GOODBYE, self._next)
        self._receiving.Wait()
        while self._inbox != _GOODBYE:
            self._mpi.Recv(self._inbox, self.neighbour)
        goodbye.Wait()

    def _exchange(self, word: str) -> str | None:
        if self._sending.Test():  # else the next rank has not taken the last one yet
            self._outbox[:] = word.encode()[:_WORD_BYTES].ljust(_WORD_BYTES)
            self._sending = self._mpi.Isend(self._outbox, self._next)
        heard = None
        while heard != "" and self._receiving.Test():
            heard = self._inbox.decode(errors="replace").strip().strip("\0")
            if heard:
                self._receiving = self._mpi.Irecv(self._inbox, self.neighbour)
        return heard
