"""A thread that ends the job when this rank makes no progress, another gives no sign of life, or NCCL fails.

It makes no CUDA call (those could break the capture of a graph) and runs while the main thread is blocked in C. It
counts the time that it sees pass: nobody stalls while the whole job is suspended, or while the machine sleeps.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from mpi_tp.errors import StoppedError
from mpi_tp.status import Status, StatusFile

_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 10.0  # a call that keeps Python's lock, or a busy machine, may silence a live rank for some seconds


class Pulse(Protocol):
    """What tells whether the other ranks live: `mpi_tp.comm.heartbeat`."""

    neighbour: int

    def beat(self, word: str) -> str | None:
        """Send `word`; return what the neighbour sent last, None if nothing new. Raises ConnectionError."""
        ...


class Watchdog:
    """Watches the main thread's phases and steps, and the rank before this one.

    `end(message, waits_for_others)` is called from the thread; it ends the job and does not return. Outside phases, a
    `script` may do what it likes for as long as it likes.
    """

    def __init__(
        self,
        status: Status,
        status_file: StatusFile,
        stall_timeout: float,
        end: Callable[[str, bool], NoReturn],
        script: bool = False,
    ) -> None:
        self.pulse: Pulse | None = None
        self.failures: list[Callable[[], str | None]] = []
        """What to ask for failures in the background; called from the thread."""
        self._status = status
        self._file = status_file
        self.stall_timeout = stall_timeout
        self._end = end
        self._script = script
        self._phases = 0
        self._is_waiting = False
        self._is_watched = True
        self._main_thread = threading.get_ident()
        self._still_seconds = 0.0
        self._silent_seconds = 0.0
        self._neighbour_place = ""

    def enter(self, phase: str) -> None:
        """Begin a phase, at step 0. That is progress."""
        self._status.phase, self._status.step = phase, 0
        self._phases += 1
        self._is_watched = True

    def leave(self) -> None:
        """End the phase."""
        self.enter(f"after {self._status.phase}")
        self._is_watched = not self._script

    def progress(self) -> None:
        """Count a step: some bytes, a layer, a token."""
        self._status.step += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For waits on other ranks, whose own watchdogs see to it that they end."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def start(self, launched: bool) -> None:
        """Start the thread; `launched`: the parent process is a launcher, without which this one must not run on."""
        launcher = os.getppid() if launched else None
        threading.Thread(target=self._watch, args=(launcher,), name="watchdog", daemon=True).start()

    def _watch(self, launcher: int | None) -> None:
        poll = min(_POLL_SECONDS, self.stall_timeout / 4)
        seen, now = self._progress_state(), time.monotonic()
        while True:
            time.sleep(poll)
            before, now = now, time.monotonic()
            seconds = min(now - before, 2 * poll)
            if launcher is not None and os.getppid() != launcher:
                self._end_orphan()
            state = self._progress_state()
            still = self._is_watched and not self._is_waiting and state == seen
            self._still_seconds = self._still_seconds + seconds if still else 0.0
            seen = state
            self._look_at_others(seconds)
            if self._still_seconds > self.stall_timeout:
                self._end_stalled()
            self._file.write()

    def _progress_state(self) -> tuple[int, int]:
        return self._phases, self._status.step

    def _look_at_others(self, seconds: float) -> None:
        for failure in self.failures:
            if message := failure():
                self._end(message, False)
        if self.pulse is None:
            return
        try:
            heard = self.pulse.beat(self._status.place())
        except ConnectionError as error:
            self._end(f"the ring of ranks is broken: {error}", True)
        self._silent_seconds = self._silent_seconds + seconds if heard is None else 0.0
        self._neighbour_place = heard or self._neighbour_place
        if self._silent_seconds > max(self.stall_timeout, _SILENCE_SECONDS):
            self._end(self._silence(self.pulse), False)

    def _end_stalled(self) -> None:
        frame = sys._current_frames()[self._main_thread]
        waits = _waits_for_others(frame)
        if waits and self.pulse and self._silent_seconds > self.stall_timeout / 2:
            self._end(self._silence(self.pulse), False)
        self._end(f"no progress for {self.stall_timeout:g} s, at {_place(frame)}", waits)

    def _silence(self, pulse: Pulse) -> str:
        known = f", last seen on {self._neighbour_place}" if self._neighbour_place else ""
        return f"no sign of life from rank {pulse.neighbour} for {self._silent_seconds:.0f} s{known}"

    def _end_orphan(self) -> NoReturn:
        """End this rank alone: as many as there are, none of them can reach the others."""
        if self._status.rank == 0:
            with suppress(OSError):  # most likely nobody reads it
                sys.stderr.write("mpi_tp: the launcher is gone\n")
        os._exit(StoppedError.exit_code)


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _waits_for_others(frame: FrameType | None) -> bool:
    """Return whether the stack of `frame` is inside a communicator, or where ranks agree on devices and replicas."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("mpi_tp.comm.", "mpi_tp.devices", "mpi_tp.replicas")):
            return True
        frame = frame.f_back
    return False
