"""The forward pass of a plain stack of linear layers: rows [B, inputs] to [B, outputs]."""

import torch

from mpi_tp.config import MLPConfig
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLPStack:
    """Layer by layer; a layer split by output features leaves its output split where the next one takes it so."""

    def __init__(self, context: LayerContext, config: MLPConfig) -> None:
        self._comm = context.comm
        self._kernels = context.kernels
        self._activation = config.activation
        self._plans = [context.plan[f"{name}.weight"] for name in config.layer_names]
        self._layers = [
            (ColumnParallelLinear if plan.axis == 0 else RowParallelLinear)(context, name)
            for plan, name in zip(self._plans, config.layer_names, strict=True)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stack's output [B, outputs] of x [B, inputs], whole on every rank."""
        last = len(self._layers) - 1
        for index, (plan, layer) in enumerate(zip(self._plans, self._layers, strict=True)):
            x = layer(x)
            if index < last:
                x = self._kernels.activation(x, self._activation)
            input_of_next_is_split = index < last and self._plans[index + 1].axis == 1
            if plan.axis == 0 and not input_of_next_is_split:
                x = self._comm.all_gather(x, plan.sizes)
        return x
