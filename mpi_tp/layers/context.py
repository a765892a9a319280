"""What a layer is built from."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.kernels.base import Kernels
from mpi_tp.partition.plan import Plan


@dataclass(frozen=True)
class LayerContext:
    """The other ranks, the arithmetic, the plan, and `take(name)`: this rank's part of a tensor, on `device`.

    A layer takes each of its tensors once, when it is built; it never slices.
    """

    comm: Communicator
    kernels: Kernels
    plan: Plan
    device: torch.device
    take: Callable[[str], torch.Tensor]

    def take_if_planned(self, name: str) -> torch.Tensor | None:
        """Return this rank's part of a tensor that the model may not have, a bias say."""
        return self.take(name) if name in self.plan else None
