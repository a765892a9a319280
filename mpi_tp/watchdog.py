"""A thread that ends a process which makes no progress, or whose launcher is gone.

It makes no CUDA call (those could break the capture of a graph) and runs while the main thread is blocked in C.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mpi_tp.errors import StoppedError

_POLL_SECONDS = 1.0
_VICTIM_SECONDS = 2.0  # what a rank that waits for others leaves them to speak first


class Watchdog:
    """Watches the main thread's phase and steps.

    `end(message, delay)` is called from the thread when a phase has made no progress for `stall_timeout` seconds; it
    ends the job, after `delay` seconds, and does not return.
    """

    def __init__(self, stall_timeout: float, end: Callable[[str, float], NoReturn]) -> None:
        self.phase = "start"
        self.step = 0
        self._stall_timeout = stall_timeout
        self._end = end
        self._phases = 0
        self._waiting = False
        self._in_phase = False
        self._main_thread = threading.get_ident()

    def enter(self, phase: str) -> None:
        """Begin a phase, at step 0. That is progress."""
        self.phase = phase
        self.step = 0
        self._phases += 1
        self._in_phase = True

    def leave(self) -> None:
        """End the phase: until the next one begins, a script may do what it likes for as long as it likes."""
        self._in_phase = False

    def progress(self) -> None:
        """Count a step: some bytes, a layer, a token."""
        self.step += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For waits on other ranks, whose own watchdogs see to it that they end."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def start(self, launched: bool) -> None:
        """Start the thread; `launched`: the parent process is a launcher, without which this one must not run on."""
        launcher = os.getppid() if launched else None
        threading.Thread(target=self._watch, args=(launcher,), name="watchdog", daemon=True).start()

    def _watch(self, launcher: int | None) -> None:
        seen, since = self._state(), time.monotonic()
        while True:
            time.sleep(min(_POLL_SECONDS, self._stall_timeout / 4))
            if launcher is not None and os.getppid() != launcher:
                with suppress(OSError):  # most likely nobody reads it
                    sys.stderr.write("mpi_tp: the launcher is gone\n")
                os._exit(StoppedError.exit_code)
            if self._waiting or not self._in_phase or self._state() != seen:
                seen, since = self._state(), time.monotonic()
            elif time.monotonic() - since > self._stall_timeout:
                self._end_stalled()

    def _state(self) -> tuple[int, int]:
        return self._phases, self.step

    def _end_stalled(self) -> None:
        frame = sys._current_frames()[self._main_thread]
        message = (
            f"no progress for {self._stall_timeout:g} s in phase {self.phase!r}, step {self.step}, at {_place(frame)}"
        )
        self._end(message, _VICTIM_SECONDS if _waits_for_others(frame) else 0.0)


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _waits_for_others(frame: FrameType | None) -> bool:
    """Return whether the stack of `frame` is inside a communicator."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mpi_tp.comm."):
            return True
        frame = frame.f_back
    return False
