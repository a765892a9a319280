"""Tensors read by threads before they are asked for, so that reading overlaps with what is done with them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mpi_tp.shards.rank_file import RankFile


class ReadAhead:
    """Reads the tensors of `file` in its order by up to `num_threads` threads; use it in a `with` statement.

    `read(name)`, which these threads and the caller's run, gives a finished tensor. At most `max_bytes` of tensors that
    were not taken exist, finished or not, besides the one that `take` is about to return; a larger tensor is read when
    it is taken, and all are if `num_threads` is 0.
    """

    def __init__(self, file: RankFile, read: Callable[[str], torch.Tensor], num_threads: int, max_bytes: int) -> None:
        self._file = file
        self._read = read
        self._waiting: dict[str, int] = {part.name: part.num_bytes for part in file.tensors.values()}
        self._futures: dict[str, Future[torch.Tensor]] = {}
        self._room = max_bytes if num_threads else 0
        self._pool = ThreadPoolExecutor(max(1, num_threads), "tensor reader")

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._futures:
            self._file.interrupt()
        self._pool.shutdown(cancel_futures=True)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, once; in the file's order it is ready soonest. Raises what reading it raised."""
        future = self._futures.pop(name, None)
        if future is None:
            del self._waiting[name]
        else:
            self._room += self._file.tensors[name].num_bytes
        self._submit()
        return self._read(name) if future is None else future.result()

    def _submit(self) -> None:
        """Start on the next tensors, as many as there is room for."""
        for name, num_bytes in list(self._waiting.items()):
            if num_bytes > self._room:
                return
            self._room -= num_bytes
            del self._waiting[name]
            self._futures[name] = self._pool.submit(self._read, name)
