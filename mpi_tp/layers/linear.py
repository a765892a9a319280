"""Linear layers whose weight is split over the ranks.

Shapes, with R ranks (R need divide nothing; rank r's share is in the plan):
  x [T, K]    T tokens or rows, K input features    y [T, N]    N output features
  column weight [N/R, K]: a rank computes its own outputs from the whole input
  row weight    [N, K/R]: a rank computes a part of the sum of every output from its own inputs
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from mpi_tp.layers.context import LayerContext


class Linear(Protocol):
    """A linear layer as its caller sees it: rows in, rows out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, inputs] to [T, outputs], each whole or this rank's part as the layer says."""
        ...


class ColumnParallelLinear:
    """x [T, K] to this rank's outputs [T, N/R]. No collective.

    With several names, the layers' outputs stand side by side: one product for q, k and v.
    """

    def __init__(self, context: LayerContext, *names: str) -> None:
        weights = [context.take(f"{name}.weight") for name in names]
        biases = [context.take_if_planned(f"{name}.bias") for name in names]
        self.output_sizes = [len(weight) for weight in weights]
        self._kernels = context.kernels
        self._weight = context.kernels.prepare(torch.cat(weights))
        self._bias = join_biases(biases, context.kernels.activation_dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, [T, sum(output_sizes)]."""
        return self._kernels.linear(x, self._weight, self._bias)


class GatheredOutputLinear:
    """x [T, K] to the whole output [T, N]: one gather, no sum across ranks."""

    def __init__(self, context: LayerContext, name: str) -> None:
        self._comm = context.comm
        self._linear = ColumnParallelLinear(context, name)
        self._output_sizes = context.plan[f"{name}.weight"].sizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output [T, N]."""
        return self._comm.all_gather(self._linear(x), self._output_sizes)


class GatheredLinear:
    """This rank's part [T, K/R] of the input to the whole output [T, N]: two gathers, no sum across ranks."""

    def __init__(self, context: LayerContext, name: str, input_sizes: Sequence[int]) -> None:
        self._comm = context.comm
        self._linear = GatheredOutputLinear(context, name)
        self._input_sizes = input_sizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output [T, N]."""
        return self._linear(self._comm.all_gather(x, self._input_sizes))


class RowParallelLinear:
    """This rank's part [T, K/R] of the input to the whole output [T, N]: one all-reduce, then the bias, once."""

    def __init__(self, context: LayerContext, name: str) -> None:
        self._comm = context.comm
        self._kernels = context.kernels
        self._weight = context.kernels.prepare(context.take(f"{name}.weight"))
        self._bias = context.take_if_planned(f"{name}.bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output [T, N]."""
        y = self._comm.all_reduce(self._kernels.linear(x, self._weight))
        return y if self._bias is None else y.add_(self._bias)


def second_linear(context: LayerContext, name: str, input_sizes: Sequence[int]) -> Linear:
    """Return the layer that takes the split output of another, as the plan splits it: by output or by input."""
    if context.plan[f"{name}.weight"].axis == 0:
        return GatheredLinear(context, name, input_sizes)
    return RowParallelLinear(context, name)


def join_biases(biases: Sequence[torch.Tensor | None], dtype: torch.dtype | None) -> torch.Tensor | None:
    """Return the biases of layers that are computed in one product, end to end; None if they have none.

    They are converted to `dtype`, if it is not None: once, not at every step.
    """
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(biases)), "layers computed in one product have biases all or none"
    return torch.cat(present).to(dtype=dtype) if present else None
