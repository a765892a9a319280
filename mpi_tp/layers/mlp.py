"""The gated MLP of Llama: down(silu(gate(x)) * up(x))."""

import torch

from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import ColumnParallelLinear, second_linear


class GatedMLP:
    """x [T, K] to [T, K] through this rank's share of the inner features."""

    def __init__(self, context: LayerContext, name: str) -> None:
        self._kernels = context.kernels
        self._gate_up_proj = ColumnParallelLinear(context, f"{name}.gate_proj", f"{name}.up_proj")
        self._down_proj = second_linear(context, f"{name}.down_proj", context.plan[f"{name}.gate_proj.weight"].sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, [T, K]."""
        gate, up = self._gate_up_proj(x).chunk(2, dim=-1)
        return self._down_proj(self._kernels.silu_mul(gate, up))
