"""The forward pass of a plain stack of linear layers: rows [B, inputs] to [B, outputs]."""

import torch

from mpi_tp.config import MLPConfig
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import ColumnParallelLinear, GatheredOutputLinear, Linear, RowParallelLinear


class MLPStack:
    """Layer by layer, with one activation between them."""

    def __init__(self, context: LayerContext, config: MLPConfig) -> None:
        self._kernels = context.kernels
        self._activation = config.activation
        followers = (*config.layer_names[1:], None)
        self._layers = [_layer(context, *pair) for pair in zip(config.layer_names, followers, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stack's output [B, outputs] of x [B, inputs], whole on every rank."""
        x = self._layers[0](x)
        for layer in self._layers[1:]:
            x = layer(self._kernels.activation(x, self._activation))
        return x


def _layer(context: LayerContext, name: str, follower: str | None) -> Linear:
    """Return the layer as the plan splits it; by output, it leaves its output split where the next one takes it so."""
    if context.plan[f"{name}.weight"].axis == 1:
        return RowParallelLinear(context, name)
    if follower and context.plan[f"{follower}.weight"].axis == 1:
        return ColumnParallelLinear(context, name)
    return GatheredOutputLinear(context, name)
