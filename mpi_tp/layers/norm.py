"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

import torch

from mpi_tp.layers.context import LayerContext


class RMSNorm:
    """x [..., K] over its root mean square, times a weight that every rank holds whole."""

    def __init__(self, context: LayerContext, name: str, eps: float) -> None:
        self._kernels = context.kernels
        self._weight = context.take(f"{name}.weight").to(dtype=context.kernels.activation_dtype)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, [..., K]."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K] (None adds nothing; x may be overwritten) and that sum normalised."""
        if delta is None:
            return x, self(x)
        return self._kernels.add_rms_norm(x, delta, self._weight, self._eps)
