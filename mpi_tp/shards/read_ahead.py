"""Tensors read by threads before they are asked for, so that reading overlaps with what is done with them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mpi_tp.shards.format import PartEntry
from mpi_tp.shards.rank_file import RankFile


class ReadAhead:
    """The tensors of `file` on `device`, read in the file's order by up to `num_readers` threads.

    Use it in a `with` statement, whose end ends the threads. They and `take` call `read_into(name, tensor)`. At most
    `max_bytes` of tensors that were not taken exist, read or not; a larger one is read when it is taken, and so are all
    if `num_readers` is 0.
    """

    def __init__(
        self,
        file: RankFile,
        device: torch.device,
        read_into: Callable[[str, torch.Tensor], None],
        num_readers: int,
        max_bytes: int,
    ) -> None:
        self._file = file
        self._device = device
        self._read_into = read_into
        self._waiting = dict(file.tensors)
        self._begun: dict[str, tuple[torch.Tensor, Future[None]]] = {}
        self._room = max_bytes if num_readers else 0
        self._pool = ThreadPoolExecutor(max(1, num_readers), "tensor reader")

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun:
            self._file.interrupt()
        self._pool.shutdown(cancel_futures=True)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, once; in the file's order it is ready soonest. Raises what reading it raised."""
        if name in self._begun:
            tensor, future = self._begun.pop(name)
            self._room += tensor.nbytes
            self._begin()
            future.result()
        else:
            tensor = self._allocate(self._waiting.pop(name))
            self._begin()
            self._read_into(name, tensor)
        return tensor

    def _begin(self) -> None:
        """Let the threads begin with the next tensors, as many as there is room for."""
        while self._waiting and (part := next(iter(self._waiting.values()))).num_bytes <= self._room:
            del self._waiting[part.name]
            self._room -= part.num_bytes
            # Here and not in the thread that reads: allocators keep what one thread gave back for that thread.
            tensor = self._allocate(part)
            self._begun[part.name] = tensor, self._pool.submit(self._read_into, part.name, tensor)

    def _allocate(self, part: PartEntry) -> torch.Tensor:
        return torch.empty(part.shape, dtype=part.dtype, device=self._device)
