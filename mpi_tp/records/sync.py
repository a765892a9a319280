"""A thread that brings what is written to a file to the disk, so that a slow disk holds up no step of the batch."""

import contextlib
import os
import threading

SYNC_SECONDS = 0.5
"""Least time from one sync to the next: what is written is on the disk within a second, if the disk can."""


class Syncer:
    """Syncs a file while the block runs, and once more at its end; `check` tells how that went."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = threading.Event()
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="journal sync")

    def __enter__(self) -> "Syncer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._written.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._sync()

    def note_write(self) -> None:
        """Have what was written synced soon. Raises OSError if an earlier sync has failed."""
        self.check()
        self._written.set()

    def check(self) -> None:
        """Raise the OSError that a sync has met."""
        if self._error:
            raise self._error

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # which is kept for the writer
            while not self._ended.is_set():
                self._written.wait()
                self._written.clear()
                self._sync()
                self._ended.wait(SYNC_SECONDS)

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._error = error
            raise
