"""What a layer may ask of the other ranks.

Tensors are named as in torch (`all_reduce`, `all_gather`, `broadcast`); Python objects go through
`bcast_object` and `all_gather_object`. Every method but `send`, `recv`, `failure` and `abort` is collective: all ranks
call it, in the same order, with tensors of the same dtype and device. Tensors must be contiguous.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch


class Communicator(Protocol):
    """A group of ranks, 0 to size - 1, that hold parts of one model."""

    rank: int
    size: int
    is_capturable: bool
    """Whether a CUDA graph can capture the tensor collectives: they queue work and wait for nothing."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` [...] over all ranks, in place, and return it. bf16 and f16 are summed in float32."""
        ...

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim` what the ranks hold; rank r's tensor has `sizes[r]` (0 is allowed) there.

        Returns a contiguous tensor [..., sum(sizes), ...], the same bits on every rank; `tensor` itself if it is all
        there is.
        """
        ...

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Sum `tensor` [..., sum(sizes), ...] over all ranks; return rank r's block of `sizes[r]` along `dim`."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every rank by the root's, and return it."""
        ...

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which must call `recv`."""
        ...

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `tensor` by what rank `src` sends, and return it."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it and has finished its work before it."""
        ...

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's Python object on every rank."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's Python object, in rank order, on every rank."""
        ...

    def failure(self) -> str | None:
        """Return what has failed in the background, None if nothing; for another thread, makes no CUDA call."""
        ...

    def abort(self, exit_code: int) -> NoReturn:
        """End every rank of the job with `exit_code`, now."""
        ...


class Mail(Protocol):
    """Python objects from any rank to any other, of which nobody knows beforehand when they come."""

    rank: int
    size: int

    def send(self, value: Any, dst: int) -> None:
        """Send to rank `dst`; returns at once."""
        ...

    def receive(self, wait_seconds: float = 0.0) -> list[tuple[int, Any]]:
        """Return what has arrived, each with the rank that sent it, in the order of its sending.

        If nothing has, sleep until something has or `wait_seconds` have passed.
        """
        ...
