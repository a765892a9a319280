"""All-gather through memory that the ranks of one host share.

Each rank writes its block to its place in the result and, once all have, copies the whole. Messages leave the blocks
one after the other, to be joined by another copy, and take several times as long: a decode step waits for four a layer.
"""

import contextlib
import functools
import math
import mmap
import os
import tempfile
from typing import TYPE_CHECKING

import torch

from mpi_tp.comm import blocks

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = "/dev/shm"
"""Where Linux keeps files in memory."""
SLOT_BYTES = 4 << 20
"""The largest result; larger ones go by messages."""


class SharedMemory:
    """Two slots in turns: who writes to one again has passed the barrier of the other, after all had read this one."""

    def __init__(self, mpi_comm: "MPI.Intracomm", memory: mmap.mmap) -> None:
        self._mpi = mpi_comm
        self._memory = torch.frombuffer(memory, dtype=torch.uint8).view(2, SLOT_BYTES)
        self._turn = 0
        self._views = functools.lru_cache(maxsize=1024)(self._make_views)

    def all_gather(self, tensor: torch.Tensor, sizes: tuple[int, ...], dim: int) -> torch.Tensor | None:
        """Do what `Communicator.all_gather` does; None, on all ranks alike, if the result has no room here."""
        views = self._views(tensor.shape, sizes, dim, tensor.dtype)
        if views is None:
            return None
        self._turn = 1 - self._turn
        whole, mine = views[self._turn]
        mine.copy_(tensor)
        self._mpi.Barrier()
        return whole.clone()

    # Tensors made in inference mode could not be written to outside it.
    @torch.inference_mode(False)
    def _make_views(
        self, shape: tuple[int, ...], sizes: tuple[int, ...], dim: int, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return, of each slot, the whole result and this rank's block of it."""
        layout = blocks.gather_layout(shape, sizes, dim)
        num_bytes = math.prod(layout.result) * dtype.itemsize
        if num_bytes > SLOT_BYTES:
            return None
        rank, pairs = self._mpi.rank, []
        for slot in self._memory:
            whole = slot[:num_bytes].view(dtype).view(layout.result)
            pairs.append((whole, whole.narrow(layout.dim, sum(sizes[:rank]), sizes[rank])))
        return pairs


def share_memory(mpi_comm: "MPI.Intracomm", host: "MPI.Comm") -> SharedMemory | None:
    """Return memory that all ranks of `mpi_comm` see, or None on all of them; collective.

    `host` holds the ranks of this rank's host. There is none if these are not all, and where the system has no room.
    """
    if host.size < mpi_comm.size:
        return None
    path = mpi_comm.bcast(_new_file() if mpi_comm.rank == 0 else None)
    memory = _map(path) if path else None
    all_see_it = all(mpi_comm.allgather(memory is not None))
    if path and mpi_comm.rank == 0:
        os.unlink(path)
    return SharedMemory(mpi_comm, memory) if memory and all_see_it else None


def _new_file() -> str | None:
    """Return a file whose memory is set aside: a write to a page that finds no room would kill the process."""
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="mpi-tp-", dir=FOLDER)
        with open(descriptor, "wb"):
            os.posix_fallocate(descriptor, 0, 2 * SLOT_BYTES)
    except OSError:
        if path:
            os.unlink(path)
        return None
    return path


def _map(path: str) -> mmap.mmap | None:
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 2 * SLOT_BYTES)
    return None
