"""Mail between threads."""

import queue
import time
from typing import Any


class QueueMail:
    """Mail of one of several ranks that share their boxes."""

    def __init__(self, boxes: list["queue.SimpleQueue[tuple[int, Any]]"], rank: int) -> None:
        self.rank = rank
        self.size = len(boxes)
        self._boxes = boxes

    def send(self, value: Any, dst: int) -> None:
        self._boxes[dst].put((self.rank, value))

    def receive(self, wait_seconds: float = 0.0) -> list[tuple[int, Any]]:
        deadline = time.monotonic() + wait_seconds
        arrived = self._take()
        while not arrived and time.monotonic() < deadline:
            time.sleep(0.001)
            arrived = self._take()
        return arrived

    def _take(self) -> list[tuple[int, Any]]:
        own = self._boxes[self.rank]
        return [own.get() for _ in range(own.qsize())]


def mail_of_threads(size: int) -> list[QueueMail]:
    """Return each rank's mail."""
    boxes: list[queue.SimpleQueue[tuple[int, Any]]] = [queue.SimpleQueue() for _ in range(size)]
    return [QueueMail(boxes, rank) for rank in range(size)]
