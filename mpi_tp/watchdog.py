"""A thread that ends a process which makes no progress, or whose launcher is gone.

It makes no CUDA call (those could break the capture of a graph) and runs while the main thread is blocked in C.
"""

import os
import select
import signal
import socket
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
_SIGNAL_SECONDS = 10.0  # from a signal until a main thread that does not come back from C is given up
_VICTIM_SECONDS = 2.0  # what a rank that waits for others leaves them to speak first


class Watchdog:
    """Watches the main thread's phase and steps.

    `end(message, delay)` is called from the thread when there has been no progress for `stall_timeout` seconds; it ends
    the job, after `delay` seconds, and does not return.
    """

    def __init__(self, stall_timeout: float, end: Callable[[str, float], NoReturn]) -> None:
        self.phase = "start"
        self.step = 0
        self._stall_timeout = stall_timeout
        self._end = end
        self._phases = 0
        self._waiting = False
        self._main_thread = threading.get_ident()

    def enter(self, phase: str) -> None:
        """Begin a phase, at step 0. That is progress."""
        self.phase = phase
        self.step = 0
        self._phases += 1

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
        arguments = (os.getppid() if launched else None, _signal_socket())
        threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()

    def _watch(self, launcher: int | None, signals: socket.socket) -> None:
        seen, since = self._state(), time.monotonic()
        signalled = float("inf")
        while True:
            if select.select([signals], [], [], min(_POLL_SECONDS, self._stall_timeout / 4))[0]:
                signals.recv(64)
                signalled = time.monotonic()
            if launcher is not None and os.getppid() != launcher:
                with suppress(OSError):  # most likely nobody reads it
                    sys.stderr.write("mpi_tp: the launcher is gone\n")
                os._exit(StoppedError.exit_code)
            if time.monotonic() - signalled > _SIGNAL_SECONDS:
                self._end(f"a signal, but phase {self.phase!r} does not stop", 0.0)
            if self._waiting or self._state() != seen:
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


def _signal_socket() -> socket.socket:
    """Return a socket that becomes readable with every signal, even if the main thread cannot run its handler."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach())
    return receiver


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
