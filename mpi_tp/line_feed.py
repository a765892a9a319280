"""Input lines read ahead by a thread, so that a slow input never holds up the batch that is running."""

import queue
import threading
from collections.abc import Iterator

from mpi_tp.records.lines import Line

IndexedLine = tuple[int, Line]
"""A line and its place among all lines of the job, 0, 1, 2 …"""

READ_AHEAD = 256
"""Lines held in memory before they are asked for."""


class LineFeed:
    """The lines of `lines`, in order, as they become available."""

    def __init__(self, lines: Iterator[IndexedLine]) -> None:
        self._queue: queue.Queue[IndexedLine | Exception | None] = queue.Queue(READ_AHEAD)
        self.is_exhausted = False
        threading.Thread(target=self._read, args=(lines,), daemon=True, name="input reader").start()

    def next_line(self, wait_seconds: float) -> IndexedLine | None:
        """Return the next line; None if there is none yet after waiting, or none any more (`is_exhausted`).

        Raises what reading the input raised.
        """
        if self.is_exhausted:
            return None
        try:
            item = self._queue.get(timeout=wait_seconds) if wait_seconds else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        self.is_exhausted = item is None
        return item

    def _read(self, lines: Iterator[IndexedLine]) -> None:
        try:
            for line in lines:
                self._queue.put(line)
        except Exception as error:
            self._queue.put(error)
        else:
            self._queue.put(None)
