"""Signals that ask a batch to stop: noted when they come, heeded between two steps, wherever they arrived."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mpi_tp.errors import StoppedError

if TYPE_CHECKING:
    from mpi4py import MPI

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STEP_SECONDS = 12.0
"""How long the step that runs when a signal comes may take; what has asked for the stop kills after 20 s or more."""

_TAG = 75


class StopRequest:
    """What the ranks know of a wish to stop. Only rank 0 acts on it; the others tell it of theirs."""

    def __init__(self, control: "MPI.Intracomm") -> None:
        self._control = control
        self._signal: int | None = None
        self._since = 0.0
        self._sent: MPI.Request | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals in the block instead of ending the job at once; all ranks call `check` between its steps."""
        before = {number: signal.signal(number, self._note) for number in STOPPING}
        yield
        for number, handler in before.items():  # after an error they stay: nothing shall interrupt the clean-up
            signal.signal(number, handler)
        self._signal = None

    def check(self) -> None:
        """Raise StoppedError on rank 0 if any rank has got a signal; on another, let rank 0 know of its own."""
        if self._control.rank > 0:
            if self._signal and self._sent is None:
                self._sent = self._control.isend(self._signal, 0, _TAG)
            return
        if self._signal:
            raise StoppedError(f"stopped by {signal.Signals(self._signal).name}")
        if self._control.iprobe(tag=_TAG):
            raise StoppedError(f"stopped by {signal.Signals(self._control.recv(tag=_TAG)).name} to another rank")

    def overdue(self) -> str | None:
        """Return, from any thread, why the job has to be ended without waiting any longer for its step, if it has."""
        if self._signal is None or time.monotonic() - self._since < STEP_SECONDS:
            return None
        name = signal.Signals(self._signal).name
        return f"stopped by {name} in a step of more than {STEP_SECONDS:g} s: the same command with --resume goes on"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._since = number, time.monotonic()
