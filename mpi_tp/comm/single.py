"""A communicator of one rank: every collective is the identity."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from mpi_tp.comm import blocks


class SingleCommunicator:
    """One rank alone, so that layers need no special case for it. Starts no MPI."""

    is_capturable = True

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` [...] itself: the sum over one rank."""
        blocks.check_contiguous(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Return `tensor` itself, which has `sizes[0]` along `dim`."""
        blocks.check_contiguous(tensor)
        blocks.check_own_size(tensor, sizes, 0, dim)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Return `tensor` itself, which has `sizes[0]` along `dim`."""
        return self.all_gather(tensor, sizes, dim)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return `tensor` itself."""
        blocks.check_contiguous(tensor)
        assert root == 0, f"root {root} of 1 rank"
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """There is nobody to send to."""
        raise AssertionError(f"rank 0 of 1 sends to rank {dst}")

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """There is nobody to receive from."""
        raise AssertionError(f"rank 0 of 1 receives from rank {src}")

    def barrier(self) -> None:
        """Return once the device has finished its work."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def bcast_object(self, value: Any, root: int = 0) -> Any:
        """Return `value`."""
        assert root == 0, f"root {root} of 1 rank"
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return `[value]`."""
        return [value]

    def failure(self) -> str | None:
        """Return None."""
        return None

    def abort(self, exit_code: int) -> NoReturn:
        """End the process with `exit_code`."""
        sys.exit(exit_code)
