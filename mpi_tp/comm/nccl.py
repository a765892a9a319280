"""A communicator over NCCL, through nccl4py. Its unique id travels by MPI: no port, no rendezvous.

Tensor collectives are queued on torch's current stream and never wait for the device, so that a CUDA graph can
capture them. (nccl4py itself takes "no stream" for the legacy stream, accepts strided tensors and drops the
remainder of an uneven reduce-scatter; hence the checks here.)
"""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mpi_tp.comm import blocks
from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI

_ABORT_SECONDS = 2.0


class NcclCommunicator:
    """The ranks of an MPI communicator, each with its GPU; made by `create`."""

    is_capturable = True

    def __init__(self, host: MpiCommunicator, nccl: Any, device: torch.device) -> None:
        from nccl.core import SUM

        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._nccl = nccl
        self._device = device
        self._sum = SUM

    @classmethod
    def create(cls, mpi_comm: "MPI.Intracomm", device: torch.device, share_gpu: bool) -> "NcclCommunicator":
        """Connect the ranks of `mpi_comm`; collective. `share_gpu` lets several ranks have one GPU (slow).

        Raises `ConfigurationError` if nccl4py or the NCCL library is missing.
        """
        if share_gpu:
            _allow_one_gpu(mpi_comm.rank)
        nccl = _import_nccl()
        torch.cuda.set_device(device)
        unique_id = mpi_comm.bcast(nccl.get_unique_id() if mpi_comm.rank == 0 else None)
        connected = nccl.Communicator.init(nranks=mpi_comm.size, rank=mpi_comm.rank, unique_id=unique_id)
        return cls(MpiCommunicator(mpi_comm), connected, device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` [...] over all ranks, in place, and return it. bf16 and f16 are summed in float32."""
        self._check(tensor)
        if not tensor.numel():
            return tensor
        summed = tensor.to(self._sum_type(tensor))
        self._nccl.allreduce(summed, summed, self._sum, stream=self._stream())
        return tensor if summed is tensor else tensor.copy_(summed)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim` what the ranks hold; rank r's tensor has `sizes[r]` (0 is allowed) there.

        Returns a new contiguous tensor [..., sum(sizes), ...], the same bits on every rank.
        """
        self._check(tensor)
        blocks.check_own_size(tensor, sizes, self.rank, dim)
        layout = blocks.gather_layout(tensor.shape, tuple(sizes), dim)
        # Uneven blocks are padded to the widest: splits differ by one unit at most, and one all-gather takes NCCL's
        # low-latency protocol where a group of broadcasts is one ring after the other.
        widest = max(layout.counts)
        even = min(layout.counts) == widest
        gathered = tensor.new_empty(layout.result if even and layout.is_joined else (self.size * widest,))
        if widest:
            self._nccl.allgather(_bytes(_padded(tensor, widest)), _bytes(gathered), stream=self._stream())
        if even and layout.is_joined:
            return gathered
        return blocks.join(gathered, [widest * rank for rank in range(self.size)], layout)

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Sum `tensor` [..., sum(sizes), ...] over all ranks; return rank r's block of `sizes[r]` along `dim`."""
        self._check(tensor)
        blocks.check_total_size(tensor, sizes, dim)
        parts = tensor.split(list(sizes), dim)
        widest = max(part.numel() for part in parts)
        packed = tensor.new_empty(self.size, widest, dtype=self._sum_type(tensor))
        for row, part in zip(packed, parts, strict=True):
            row[: part.numel()].view(part.shape).copy_(part)
        mine = packed.new_empty(widest)
        if widest:
            self._nccl.reduce_scatter(packed, mine, self._sum, stream=self._stream())
        own = parts[self.rank]
        return mine[: own.numel()].view(own.shape).to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every rank by the root's, and return it."""
        self._check(tensor)
        if tensor.numel():
            data = _bytes(tensor)
            self._nccl.broadcast(data, data, root, stream=self._stream())
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which must call `recv`."""
        self._check(tensor)
        if tensor.numel():
            self._nccl.send(_bytes(tensor), dst, stream=self._stream())

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `tensor` by what rank `src` sends, and return it."""
        self._check(tensor)
        if tensor.numel():
            self._nccl.recv(_bytes(tensor), src, stream=self._stream())
        return tensor

    def barrier(self) -> None:
        """Return once every rank has called it and its device has finished the work before it."""
        torch.cuda.synchronize(self._device)
        self._host.barrier()

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's Python object on every rank; by MPI."""
        return self._host.bcast_object(value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's Python object, in rank order, on every rank; by MPI."""
        return self._host.all_gather_object(value)

    def failure(self) -> str | None:
        """Return what NCCL's own threads have met, None if nothing: a lost connection, say. Makes no CUDA call."""
        state = self._nccl.get_async_error()
        if state.name in ("Success", "InProgress"):
            return None
        return f"NCCL reports {state.name}: {self._nccl.get_last_error() or 'no more is known'}"

    def abort(self, exit_code: int) -> NoReturn:
        """End every rank of the job with `exit_code`, now."""
        # Aborting NCCL frees peers that wait for this one, but can itself wait for the device.
        aborting = threading.Thread(target=self._nccl.abort, daemon=True)
        aborting.start()
        aborting.join(_ABORT_SECONDS)
        self._host.abort(exit_code)

    def _check(self, tensor: torch.Tensor) -> None:
        blocks.check_contiguous(tensor)
        assert tensor.device == self._device, f"tensor on {tensor.device}, communicator on {self._device}"

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _sum_type(self, tensor: torch.Tensor) -> torch.dtype:
        """Return float32 for halves; two ranks make one addition, which rounds once in any type."""
        return torch.float32 if tensor.dtype in blocks.HALVES and self.size > 2 else tensor.dtype


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat view: to move it, NCCL need not know its type."""
    return tensor.view(-1).view(torch.uint8)


def _padded(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return `tensor`, flat, with at least `count` elements; what is added is not initialised."""
    if tensor.numel() == count:
        return tensor
    padded = tensor.new_empty(count)
    padded[: tensor.numel()].copy_(tensor.view(-1))
    return padded


def _import_nccl() -> Any:
    try:
        import nccl.core as nccl
    except ImportError as error:
        raise ConfigurationError(
            f'NCCL needs nccl4py ({error}): pip install "mpi-tp[gpu]", or send through the host with --comm mpi'
        ) from error
    if nccl.get_version().libnccl is None:
        raise ConfigurationError(
            "nccl4py finds no libnccl.so.2: install a torch built for CUDA, or send through the host with --comm mpi"
        )
    return nccl


def _allow_one_gpu(rank: int) -> None:
    """Make NCCL take each rank for a host of its own, which may have the same GPU as another.

    NCCL reads these variables at its first call; below version 2.30 it knows no other way.
    """
    os.environ["NCCL_HOSTID"] = f"mpi_tp-rank-{rank}"
    for name, value in {
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "1",
    }.items():
        os.environ.setdefault(name, value)


def library_version() -> str:
    """Return the version of the NCCL library that this process would use, "none" without one."""
    try:
        import nccl.core as nccl
    except ImportError:
        return "none"
    found = nccl.get_version().libnccl
    return str(found.version) if found else "none"
