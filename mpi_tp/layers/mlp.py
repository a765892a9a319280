"""The gated MLP of Llama: down(silu(gate(x)) * up(x))."""

import torch

from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import join_biases, second_linear


class GatedMLP:
    """x [T, K] to [T, K] through this rank's share of the inner features."""

    def __init__(self, context: LayerContext, name: str) -> None:
        gate, up = f"{name}.gate_proj", f"{name}.up_proj"
        self._kernels = context.kernels
        self._weight = context.kernels.prepare_gated(context.take(f"{gate}.weight"), context.take(f"{up}.weight"))
        biases = [context.take_if_planned(f"{layer}.bias") for layer in (gate, up)]
        self._bias = join_biases(biases, context.kernels.activation_dtype)
        self._down_proj = second_linear(context, f"{name}.down_proj", context.plan[f"{gate}.weight"].sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, [T, K]."""
        return self._down_proj(self._kernels.gated_linear(x, self._weight, self._bias))
