"""A communicator over MPI. Tensors on a GPU pass through pinned host memory; no GPU-aware MPI is needed.

On one host, tensors of CPUs are gathered through shared memory.

MPI has no bfloat16: tensors travel as bytes, and halves are summed in float32.
"""

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mpi_tp.comm import blocks
from mpi_tp.comm.shared_memory import SharedMemory, share_memory

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiCommunicator:
    """The ranks of an mpi4py communicator, which nobody else may use: give it a duplicate of a shared one."""

    is_capturable = False

    def __init__(self, mpi_comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.rank = mpi_comm.rank
        self.size = mpi_comm.size
        self._mpi = mpi_comm
        self._in_place = MPI.IN_PLACE
        self._world = MPI.COMM_WORLD
        self._buffer = MPI.buffer

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` [...] over all ranks, in place, and return it. bf16 and f16 are summed in float32."""
        host = _summable(tensor)
        self._mpi.Allreduce(self._in_place, host.numpy())
        return _copy_back(host, tensor)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim` what the ranks hold; rank r's tensor has `sizes[r]` (0 is allowed) there.

        Returns a new contiguous tensor [..., sum(sizes), ...], the same bits on every rank.
        """
        blocks.check_own_size(tensor, sizes, self.rank, dim)
        if not tensor.is_cuda and self._shared is not None:
            blocks.check_contiguous(tensor)
            joined = self._shared.all_gather(tensor, tuple(sizes), dim)
            if joined is not None:
                return joined
        layout = blocks.gather_layout(tensor.shape, tuple(sizes), dim)
        shape = layout.result if layout.is_joined else (sum(layout.counts),)
        gathered = _host_memory(tensor, shape)
        byte_counts = [count * tensor.element_size() for count in layout.counts]
        self._mpi.Allgatherv(self._bytes(_on_host(tensor)), (self._bytes(gathered), byte_counts))
        if tensor.is_cuda:
            gathered = gathered.to(tensor.device)
        return gathered if layout.is_joined else blocks.join(gathered, blocks.offsets_of(layout.counts), layout)

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Sum `tensor` [..., sum(sizes), ...] over all ranks; return rank r's block of `sizes[r]` along `dim`."""
        blocks.check_total_size(tensor, sizes, dim)
        parts = tensor.split(list(sizes), dim)
        packed = _summable(torch.cat([part.reshape(-1) for part in parts]))
        mine = torch.empty(parts[self.rank].shape, dtype=packed.dtype)
        self._mpi.Reduce_scatter(packed.numpy(), mine.numpy(), [part.numel() for part in parts])
        return mine.to(tensor.device, tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every rank by the root's, and return it."""
        host = _on_host(tensor) if self.rank == root else _landing(tensor)
        self._mpi.Bcast(self._bytes(host), root)
        return _copy_back(host, tensor)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which must call `recv`."""
        self._mpi.Send(self._bytes(_on_host(tensor)), dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `tensor` by what rank `src` sends, and return it."""
        host = _landing(tensor)
        self._mpi.Recv(self._bytes(host), src)
        return _copy_back(host, tensor)

    def barrier(self) -> None:
        """Return once every rank has called it and has finished its work before it."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._mpi.Barrier()

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's Python object on every rank."""
        return self._mpi.bcast(value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's Python object, in rank order, on every rank."""
        return self._mpi.allgather(value)

    def failure(self) -> str | None:
        """Return None: what fails in MPI fails in the call."""
        return None

    def abort(self, exit_code: int) -> NoReturn:
        """End every rank of the job with `exit_code`, now."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(exit_code)
        raise AssertionError("MPI_Abort returned")

    @functools.cached_property
    def _shared(self) -> SharedMemory | None:
        """Memory that all ranks share, if they are on one host; made by the first all-gather, on all of them."""
        host = split_by_host(self._mpi)
        shared = share_memory(self._mpi, host)
        host.Free()
        return shared

    def _bytes(self, host: torch.Tensor) -> "MPI.buffer":
        """Return the memory of a contiguous host tensor as MPI sees it: bytes of no type."""
        return self._buffer.fromaddress(host.data_ptr(), host.nbytes)


def split_by_host(mpi_comm: "MPI.Intracomm") -> "MPI.Comm":
    """Return the communicator of the ranks on this rank's host, in rank order; collective."""
    from mpi4py import MPI

    return mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, key=mpi_comm.rank)


def _host_memory(tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return uninitialised host memory, pinned (from torch's cache of it) if `tensor` is on a GPU."""
    return torch.empty(shape, dtype=dtype or tensor.dtype, pin_memory=tensor.is_cuda)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself if it is on the CPU, otherwise a pinned copy, complete when this returns."""
    return _landing(tensor).copy_(tensor) if tensor.is_cuda else _landing(tensor)


def _landing(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host memory that a message for `tensor` is received in: its own if it is on the CPU."""
    blocks.check_contiguous(tensor)
    return _host_memory(tensor, tensor.shape) if tensor.is_cuda else tensor


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor of the same values in a type that MPI can sum; `tensor` itself if it is one."""
    blocks.check_contiguous(tensor)
    if tensor.dtype in blocks.HALVES:
        return _host_memory(tensor, tensor.shape, torch.float32).copy_(tensor)
    return _on_host(tensor)


def _copy_back(host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if host is tensor else tensor.copy_(host)


def library_version() -> str:
    """Return name and version of the MPI library."""
    from mpi4py import MPI

    text: str = MPI.Get_library_version()
    return " ".join(text.partition("\n")[0].partition(",")[0].replace("\0", "").split())
