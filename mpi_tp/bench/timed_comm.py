"""How long a rank is in collectives."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from mpi_tp.comm.mpi import MpiCommunicator


class TimedMpiCommunicator(MpiCommunicator):
    """Adds up the time in tensor collectives: moving, summing, and waiting for the other ranks."""

    seconds = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do what `MpiCommunicator` does, under the clock."""
        with self._clock():
            return super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Do what `MpiCommunicator` does, under the clock."""
        with self._clock():
            return super().all_gather(tensor, sizes, dim)

    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Do what `MpiCommunicator` does, under the clock."""
        with self._clock():
            return super().reduce_scatter(tensor, sizes, dim)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Do what `MpiCommunicator` does, under the clock."""
        with self._clock():
            return super().broadcast(tensor, root)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def nccl_share(device_times: Mapping[str, float]) -> float | None:
    """Return the share of NCCL's kernels in what the device did, by the names of its kernels and copies.

    None if nothing was seen: not every machine lets its users profile.
    """
    total = sum(device_times.values())
    return sum(time for name, time in device_times.items() if "nccl" in name.lower()) / total if total else None
