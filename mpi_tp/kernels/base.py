"""The arithmetic of a transformer block, as the layers ask for it.

Shape suffix legend
  T = packed tokens of all sequences in the step    K = input features    N = output features of this rank
  H = query heads of this rank    G = key/value heads of this rank    D = head dimension
  B = sequences in the step    P = blocks of the key/value cache    S = tokens a block
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [P, S, G, D]."""


@dataclass(frozen=True)
class AttentionInputs:
    """Where the step's tokens stand: one row a token, tokens of one sequence in ascending position.

    `positions` [T] int64; `sequence_ids` [T] int64, the row of `block_tables` [B, max blocks] int32 (padded with 0)
    that lists the cache blocks of the token's sequence in order; `slots` [T] int64, block * S + offset, where the
    token's key and value go.
    """

    positions: torch.Tensor
    sequence_ids: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor


class Kernels(Protocol):
    """One implementation of every operation, for one device and one promise about numerics."""

    activation_dtype: torch.dtype | None
    """dtype of activations and key/value cache; None: that of the weights."""

    def prepare(self, weight_NK: torch.Tensor) -> Any:
        """Pack the weight [N, K] of a linear layer into the form that `linear` takes (N or K may be 0)."""
        ...

    def linear(self, x_TK: torch.Tensor, weight: Any, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N] for a weight that went through `prepare`."""
        ...

    def embedding(self, ids_T: torch.Tensor, weight: Any, start: int) -> torch.Tensor:
        """Return rows [T, K] of a prepared weight that holds vocabulary rows start … start + N - 1; others are zero."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float32 or finer."""
        ...

    def rotary(self, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        """Rotate heads [T, H, D] by position: halves (not pairs) belong together, as in Hugging Face's models.

        `cos` and `sin` are float32 [T, D] (the two halves equal).
        """
        ...

    def silu_mul(self, gate_TN: torch.Tensor, up_TN: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, N]."""
        ...

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        ...

    def write_kv(
        self,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        cache: Cache,
        slots_T: torch.Tensor,
    ) -> None:
        """Store keys and values of the step's tokens in the caches [P, S, G, D] at their slots.

        In which order a block holds its numbers is up to the kernels; blocks can be copied whole.
        """
        ...

    def attention(
        self,
        q_THD: torch.Tensor,
        cache: Cache,
        kv_index_H: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention [T, H, D] of each token over its own sequence, up to and with itself.

        `kv_index` [H] int64 names the local key/value head of each local query head. With a `window` w a token sees
        itself and the w - 1 before it; None is unlimited.
        """
        ...
