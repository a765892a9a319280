"""How a rank ends all of them: one line that says what happened and where, then one exit code."""

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from mpi_tp.errors import ConfigurationError, JobError, StoppedError
from mpi_tp.launcher import see_launcher_end
from mpi_tp.status import Status, StatusFile

if TYPE_CHECKING:
    from mpi4py import MPI

TURN_SECONDS = 1.0
"""Ranks that fail without knowing of each other speak in turn; the first ends the others."""
_LAST_TURN = 16
_VICTIM_SECONDS = 2.0  # what ranks that wait for others leave those, to speak first
_FORWARD_SECONDS = 0.2  # lets the launcher pass on the last words before it is told to end all ranks
_SPEAKING_SECONDS = 10.0  # how long one thread waits for the other to end the process


class LastWords:
    """What one rank says at its end; `world` is MPI's while there is an MPI that can end the other ranks."""

    def __init__(self, status: Status, status_file: StatusFile) -> None:
        self.world: MPI.Intracomm | None = None
        self._status = status
        self._file = status_file
        self._is_spoken = threading.Lock()

    @property
    def turn_seconds(self) -> float:
        """How long this rank leaves lower ones to speak first."""
        return TURN_SECONDS * min(self._status.rank, _LAST_TURN)

    def end_stalled(self, message: str, waits_for_others: bool) -> NoReturn:
        """End all ranks as stopped early, from a thread; one that waits for others lets all others speak first."""
        patience = _VICTIM_SECONDS + TURN_SECONDS * min(self._status.size - 1, _LAST_TURN) if waits_for_others else 0.0
        time.sleep(patience + self.turn_seconds)
        self.end(StoppedError.exit_code, message)

    def end(self, exit_code: int, message: str, error: BaseException | None = None) -> NoReturn:
        """Print the line, after the traceback of `error`, and end all ranks."""
        if not self._is_spoken.acquire(timeout=_SPEAKING_SECONDS):
            os._exit(exit_code)
        line = " ".join(f"{message} ({self._status.place()})".split())
        self._status.error = line
        with contextlib.suppress(OSError):  # that nobody reads its last words must not keep a rank alive
            sys.stdout.flush()
            if error is not None:
                traceback.print_exception(error)
            sys.stderr.write(f"mpi_tp: [rank {self._status.rank}/{self._status.size}] {line}\n")
            sys.stderr.flush()
        self._file.write()
        if self._status.size > 1:
            time.sleep(_FORWARD_SECONDS)
            self._end_others(exit_code)
        os._exit(exit_code)

    def _end_others(self, exit_code: int) -> None:
        if self.world is None:
            see_launcher_end()
        else:
            self.world.Abort(exit_code)


def outcome(error: BaseException) -> tuple[int, str, bool]:
    """Return the exit code and the words for `error`, and whether its traceback helps."""
    if isinstance(error, JobError):
        return error.exit_code, str(error), False
    if isinstance(error, KeyboardInterrupt):
        return StoppedError.exit_code, "interrupted: run the same command again", False
    name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if _is_out_of_memory(error):
        advice = "use more ranks, or lower --kv-memory or --max-batch-size"
        return ConfigurationError.exit_code, f"out of memory: {advice} ({name})", False
    return JobError.exit_code, name, True


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; of torch, by name and words, since it need not be loaded."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )
