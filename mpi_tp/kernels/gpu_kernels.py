"""Kernels for NVIDIA GPUs in Triton, and the library's where they are as fast.

With `invariant` the bits of a row of a result depend on that row and the weights alone: every operation has one order
of its sums for any batch, rank count and schedule. Without, one row alone and very many rows go through faster ways,
and attention is cut into as many parts as keep the GPU busy.
"""

import torch
from torch.nn import functional

from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.kernels.choice import TorchChoice
from mpi_tp.kernels.gpu import attention, embedding, norm, product, rotary, tokens
from mpi_tp.kernels.gpu.product import Weight
from mpi_tp.kernels.gpu.tiles import TiledInputs
from mpi_tp.kernels.torch_kernels import FUNCTIONS

FEW_ROWS = 64
"""Up to here our product is as fast as the library's or faster."""


class GpuKernels(TorchChoice):
    """The `Kernels` protocol on a GPU."""

    activation_dtype: torch.dtype | None = None

    def __init__(self, invariant: bool) -> None:
        self._invariant = invariant

    def prepare(self, weight_NK: torch.Tensor) -> Weight:
        """Return the weight [N, K] with its rows aligned."""
        return Weight(weight_NK, gated=False)

    def prepare_gated(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> Weight:
        """Pack gate and up as one weight [2N, K]."""
        return Weight(torch.cat((gate_NK, up_NK)), gated=True)

    def linear(self, x_TK: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N]."""
        if not x_TK.numel() or not weight.num_outputs:
            return functional.linear(x_TK, weight.tensor[:, : weight.num_inputs], bias_N)
        if self._invariant or 1 < len(x_TK) <= FEW_ROWS:
            return product.multiply(x_TK, weight, bias_N)
        if len(x_TK) == 1:
            return product.multiply_row(x_TK, weight, bias_N)
        return functional.linear(x_TK, weight.tensor[:, : weight.num_inputs], bias_N)

    def gated_linear(self, x_TK: torch.Tensor, weight: Weight, bias_2N: torch.Tensor | None = None) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]."""
        if not x_TK.numel() or not weight.num_outputs:
            return x_TK.new_zeros(len(x_TK), weight.num_outputs)
        if len(x_TK) == 1 and not self._invariant:
            return product.multiply_row(x_TK, weight, bias_2N)
        return product.multiply(x_TK, weight, bias_2N)

    def embedding(self, ids_T: torch.Tensor, weight: Weight, start: int) -> torch.Tensor:
        """Return the rows [T, K] of the ids in start … start + N - 1, zeros for the others."""
        return embedding.embed(ids_T, weight.tensor, weight.num_inputs, start)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float32."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K], which overwrites x, and its `rms_norm`."""
        return norm.add_rms_norm(x, delta, weight, eps)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        return FUNCTIONS[name](x)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: AttentionHeads,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Return q [T, H, D], rotated; store k, rotated, and v in the cache, inside a block in the order [G, S, D]."""
        return rotary.rotate_and_store(qkv, heads, rotation, cache, inputs)

    def attention(
        self,
        q_THD: torch.Tensor,
        cache: Cache,
        heads: AttentionHeads,
        inputs: AttentionInputs,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention [T, H, D] of each token over its own sequence; `inputs` come in tiles."""
        assert isinstance(inputs, TiledInputs), "the runner deals the tokens out in tiles"
        unit = attention.INVARIANT_UNIT
        if not self._invariant:
            unit = attention.fastest_unit(inputs.num_single, heads.num_kv_heads, inputs.longest)
        return attention.attend(q_THD, cache, heads, inputs, window, unit)

    def best_token(self, logits_RN: torch.Tensor, start: int) -> torch.Tensor:
        """Return each row's largest logit and its token [R, 2], the first of equals."""
        if not logits_RN.shape[1]:
            return super().best_token(logits_RN, start)
        return tokens.best_token(logits_RN, start)

    def choose_token(self, best_RX2: torch.Tensor) -> torch.Tensor:
        """Return the token [R] of the best pair [R, ranks, 2], -1 where its logit is not finite."""
        return tokens.choose_token(best_RX2)
