"""The operations of a layer put together from elementary ones: what a kernel set has until it fuses them.

Shape suffixes as in base.py.
"""

import math
from typing import Any, Protocol

import torch

from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache


class Elementary(Protocol):
    """What `ComposedKernels` is made of."""

    def prepare(self, weight_NK: torch.Tensor) -> Any:
        """Pack the weight [N, K] of a linear layer."""
        ...

    def linear(self, x_TK: torch.Tensor, weight: Any, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]."""
        ...

    def rotary(self, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        """Rotate heads [T, H, D] by position, halves together."""
        ...

    def silu_mul(self, gate_TN: torch.Tensor, up_TN: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, N]."""
        ...

    def write_kv(self, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cache: Cache, slots_T: torch.Tensor) -> None:
        """Store keys and values of the step's tokens in the caches [P, S, G, D] at their slots."""
        ...


class ComposedKernels:
    """The fused part of the `Kernels` protocol, one elementary operation after the other."""

    def add_rms_norm(
        self: Elementary, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K] and its `rms_norm`."""
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def prepare_gated(self: Elementary, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> Any:
        """Pack gate and up as one weight [2N, K]."""
        return self.prepare(torch.cat((gate_NK, up_NK)))

    def gated_linear(
        self: Elementary, x_TK: torch.Tensor, weight: Any, bias_2N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]."""
        return self.silu_mul(*self.linear(x_TK, weight, bias_2N).chunk(2, dim=-1))

    def rotate_and_store(
        self: Elementary,
        qkv: torch.Tensor,
        heads: AttentionHeads,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Return q [T, H, D], rotated; store k, rotated, and v [T, G, D] in the cache."""
        by_head = qkv.unflatten(-1, (-1, heads.head_dim))
        q_THD, k_TGD, v_TGD = by_head.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q_THD = self.rms_norm(q_THD, heads.q_norm, heads.norm_eps)
            k_TGD = self.rms_norm(k_TGD, heads.k_norm, heads.norm_eps)
        self.write_kv(self.rotary(k_TGD, *rotation), v_TGD, cache, inputs.slots)
        return self.rotary(q_THD, *rotation)

    def best_token(self, logits_RN: torch.Tensor, start: int) -> torch.Tensor:
        """Return each row's largest logit and its token [R, 2], the first of equals."""
        if not logits_RN.shape[1]:
            return torch.tensor([-math.inf, 0.0], device=logits_RN.device).repeat(len(logits_RN), 1)
        values, columns = logits_RN.max(dim=-1)
        return torch.stack((values.float(), (columns + start).float()), dim=-1)

    def choose_token(self, best_RX2: torch.Tensor) -> torch.Tensor:
        """Return the token [R] of the best pair [R, ranks, 2], -1 where its logit is not finite."""
        values, tokens = best_RX2.unbind(-1)
        top, owner = values.max(dim=-1, keepdim=True)
        return torch.where(top.isfinite(), tokens.gather(-1, owner), -1.0).squeeze(-1).long()
