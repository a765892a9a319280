"""Tensors of a rank file into the memory of a GPU, by way of a little pinned memory that is used again and again."""

import itertools
import queue

import torch

from mpi_tp.shards.checksum import tensor_bytes
from mpi_tp.shards.rank_file import RankFile

STAGING_BYTES = 8 << 20
"""One buffer of pinned memory: large enough for fast reads and copies, small enough for the processor's cache."""


class DeviceReader:
    """Reads the tensors of `file` into tensors on `device`, a GPU; up to `num_readers` threads may read at once.

    It holds 2 * num_readers * STAGING_BYTES of pinned memory. Create it under the stream that is current when the
    tensors are allocated.
    """

    def __init__(self, file: RankFile, device: torch.device, num_readers: int) -> None:
        self._file = file
        self._stagings: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        for _ in range(num_readers):
            self._stagings.put(_Staging(device))

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Read into a contiguous tensor of the part's shape and dtype; when this returns, any stream may use it.

        Raises FileError as `RankFile.read` does.
        """
        staging = self._stagings.get()
        try:
            staging.read_into(self._file, name, tensor)
        finally:
            self._stagings.put(staging)


class _Buffer:
    """Pinned memory and the event of the last copy out of it."""

    def __init__(self) -> None:
        self.memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event(blocking=True)

    def reclaim(self) -> memoryview:
        """Wait for the last copy out of the memory and return it, to be overwritten."""
        self.copied.synchronize()
        return tensor_bytes(self.memory)


class _Staging:
    """Two buffers, so that one is filled from the file while the other is copied, and the stream of the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocating = torch.cuda.current_stream(device)
        self._copying = torch.cuda.Stream(device)
        self._buffers = (_Buffer(), _Buffer())

    def read_into(self, file: RankFile, name: str, tensor: torch.Tensor) -> None:
        """Read and copy, and wait for the copies."""
        # A thread that never chose a device would open the first GPU, which may be another rank's.
        with torch.cuda.device(self._device), torch.cuda.stream(self._copying):
            # The memory may have been another tensor's that work queued on its stream still reads.
            self._copying.wait_stream(self._allocating)
            try:
                self._copy_pieces(file, name, tensor.reshape(-1).view(torch.uint8))
            finally:
                for buffer in self._buffers:
                    buffer.reclaim()

    def _copy_pieces(self, file: RankFile, name: str, target: torch.Tensor) -> None:
        pieces = file.pieces(name, (buffer.reclaim() for buffer in itertools.cycle(self._buffers)))
        # `pieces` stands first, to run to its end: the checksum is verified there.
        for piece, buffer, part in zip(pieces, itertools.cycle(self._buffers), target.split(STAGING_BYTES)):
            part.copy_(buffer.memory[: len(piece)], non_blocking=True)
            buffer.copied.record(self._copying)
