"""Tensors of a rank file into the memory of a GPU, by way of a little pinned memory that is used again and again."""

import itertools
import queue
from collections.abc import Iterator

import torch

from mpi_tp.shards.checksum import tensor_bytes
from mpi_tp.shards.rank_file import RankFile

STAGING_BYTES = 8 << 20
"""One staging buffer: large enough for fast reads and copies, small enough to stay in the processor's cache."""


class DeviceReader:
    """Reads the tensors of `file` onto `device`, a GPU; up to `num_threads` threads may read at once.

    It has 2 * num_threads * STAGING_BYTES of pinned memory. Create it under the stream that will use the tensors.
    """

    def __init__(self, file: RankFile, device: torch.device, num_threads: int) -> None:
        self._file = file
        self._stagings: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._stagings.put(_Staging(device))

    def read(self, name: str) -> torch.Tensor:
        """Return this rank's part of tensor `name`, its checksum verified, ready for use on any stream.

        Raises FileError as `RankFile.read` does, torch.OutOfMemoryError if the device has no room for it.
        """
        staging = self._stagings.get()
        try:
            return staging.read(self._file, name)
        finally:
            self._stagings.put(staging)


class _Buffer:
    """Pinned memory and the event of the last copy out of it."""

    def __init__(self) -> None:
        self.memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()

    def wait(self) -> memoryview:
        """Return the memory, to be overwritten, once the last copy out of it is done."""
        self.copied.synchronize()
        return tensor_bytes(self.memory)


class _Staging:
    """Two buffers, so that one is filled from the file while the other is copied, and the stream of the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._user = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._buffers = (_Buffer(), _Buffer())

    def read(self, file: RankFile, name: str) -> torch.Tensor:
        part = file.tensors[name]
        with torch.cuda.stream(self._user):  # whose memory it is, for the allocator
            tensor = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        # That memory may have been another tensor's, which work that is queued on the user's stream still reads.
        self._stream.wait_stream(self._user)
        try:
            self._copy(file, name, tensor.reshape(-1).view(torch.uint8))
        finally:
            self._stream.synchronize()
        return tensor

    def _copy(self, file: RankFile, name: str, target: torch.Tensor) -> None:
        pieces = file.pieces(name, self._free_buffers())
        # `pieces` comes first: it must run to its end, where the checksum is verified.
        for piece, buffer, part in zip(pieces, itertools.cycle(self._buffers), target.split(STAGING_BYTES)):
            with torch.cuda.stream(self._stream):
                part.copy_(buffer.memory[: len(piece)], non_blocking=True)
                buffer.copied.record()

    def _free_buffers(self) -> Iterator[memoryview]:
        for buffer in itertools.cycle(self._buffers):
            yield buffer.wait()
