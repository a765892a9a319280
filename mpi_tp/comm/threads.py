"""Ranks as threads of one process: tensor-parallel code in one debugger, without MPI.

For tests and debugging. Unlike the real ones, it notices ranks that call different collectives.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from mpi_tp.comm import blocks

T = TypeVar("T")

_POLL_SECONDS = 0.05


class _Group:
    """What the ranks of one group share: a barrier, a slot for each rank and a mailbox for each pair."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (src, dst): queue.SimpleQueue() for src in range(size) for dst in range(size)
        }


class ThreadCommunicator:
    """One rank of a group of threads, made by `run_ranks`. Sums run in rank order: equal bits everywhere."""

    is_capturable = False

    def __init__(self, group: _Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` [...] over all ranks, in place, and return it; bf16 and f16 are summed in float32."""
        return tensor.copy_(_sum(self._exchange_tensors("all_reduce", tensor)))

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim` what the ranks hold; rank r has `sizes[r]` there; 0 is allowed."""
        blocks.check_own_size(tensor, sizes, self.rank, dim)
        return torch.cat(self._exchange_tensors(f"all_gather {list(sizes)}", tensor), dim)

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Sum `tensor` [..., sum(sizes), ...] over all ranks and return rank r's block of `sizes[r]` there."""
        blocks.check_total_size(tensor, sizes, dim)
        total = _sum(self._exchange_tensors(f"reduce_scatter {list(sizes)}", tensor))
        return total.split(list(sizes), dim)[self.rank].to(tensor.dtype).contiguous()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every rank by the root's, and return it."""
        return tensor.copy_(self._exchange_tensors(f"broadcast from {root}", tensor)[root])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which must call `recv`."""
        self._group.mail[self.rank, dst].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `tensor` by what rank `src` sends, and return it."""
        mailbox = self._group.mail[src, self.rank]
        while True:
            try:
                sent = mailbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._group.barrier.broken:
                    raise threading.BrokenBarrierError from None
                continue
            assert sent.dtype == tensor.dtype, f"rank {src} sent {sent.dtype}, expected {tensor.dtype}"
            return tensor.copy_(sent)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._exchange("barrier", None)

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's Python object on every rank."""
        return self._exchange(f"bcast_object from {root}", value)[root]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's Python object, in rank order, on every rank."""
        return self._exchange("all_gather_object", value)

    def failure(self) -> str | None:
        """Return None: a thread that fails ends `run_ranks`."""
        return None

    def abort(self, exit_code: int) -> NoReturn:
        """End `run_ranks` with `SystemExit(exit_code)`."""
        raise SystemExit(exit_code)

    def finish(self) -> None:
        """Wait for the other ranks to return too; one that still wants a collective fails by name."""
        self._exchange("the end", None)

    def _exchange_tensors(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        blocks.check_contiguous(tensor)
        # A copy: the owner may overwrite its tensor while a slower rank still reads.
        return self._exchange(f"{what} of {tensor.dtype}", tensor.clone())

    def _exchange(self, what: str, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        group = self._group
        group.slots[self.rank] = (what, value)
        group.barrier.wait()
        slots = list(group.slots)
        group.barrier.wait()
        calls = [call for call, _ in slots]
        assert len(set(calls)) == 1, f"the ranks call different collectives: {calls}"
        return [value for _, value in slots]


def run_ranks(n: int, function: Callable[[ThreadCommunicator], T], timeout: float = 60.0) -> list[T]:
    """Call `function(comm)` as each of `n` ranks, without gradients; return the results in rank order.

    The first rank to fail stops the others, and its exception is raised here. Ranks that wait for each other
    longer than `timeout` seconds fail with `threading.BrokenBarrierError`.
    """
    group = _Group(n, timeout)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        comm = ThreadCommunicator(group, rank)
        try:
            with torch.no_grad():
                results[rank] = function(comm)
                comm.finish()
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum in rank order; halves in float32."""
    wide = torch.float32 if tensors[0].dtype in blocks.HALVES else tensors[0].dtype
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total
