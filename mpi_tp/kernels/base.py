"""The arithmetic of a transformer block, as the layers ask for it.

Shape suffix legend
  T = packed tokens of all sequences in the step    K = input features    N = output features of this rank
  H = query heads of this rank    G = key/value heads of this rank    D = head dimension
  B = sequences in the step    P = blocks of the key/value cache    S = tokens a block
"""

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [P, S, G, D]."""


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one rank's attention.

    `kv_index` [H] int64 names the local key/value head of each local query head, ascending. `q_norm` and `k_norm` [D]
    are the weights of an RMSNorm over each head, both None where the model has none.
    """

    kv_index: torch.Tensor
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0

    @functools.cached_property
    def head_starts(self) -> torch.Tensor:
        """int32 [G + 1]: the query heads of key/value head g are head_starts[g] … head_starts[g + 1] - 1."""
        counts = torch.bincount(self.kv_index, minlength=self.num_kv_heads)
        return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()

    @functools.cached_property
    def largest_group(self) -> int:
        """The most query heads that share a key/value head."""
        return int(torch.bincount(self.kv_index).max())

    @property
    def num_heads(self) -> int:
        """How many query heads the rank has."""
        return len(self.kv_index)


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

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K] and its `rms_norm`; x may be overwritten."""
        ...

    def prepare_gated(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> Any:
        """Pack the weights of gate and up, [N, K] each, into the form that `gated_linear` takes."""
        ...

    def gated_linear(self, x_TK: torch.Tensor, weight: Any, bias_2N: torch.Tensor | None = None) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]; `bias` holds gate's, then up's."""
        ...

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: AttentionHeads,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Split q, k and v [T, (H + 2G) * D]; return q [T, H, D], rotated; store k, rotated, and v in the cache.

        Heads go through their norm first, if they have one. `rotation` is float32 cos and sin [T, D], the two halves
        equal; halves (not pairs) of a head belong together, as in Hugging Face's models. In which order a block of the
        cache holds its numbers is up to the kernels; blocks can be copied whole.
        """
        ...

    def attention(
        self,
        q_THD: torch.Tensor,
        cache: Cache,
        heads: AttentionHeads,
        inputs: AttentionInputs,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention [T, H, D] of each token over its own sequence, up to and with itself.

        Scores are scaled by D ** -0.5. With a `window` w a token sees itself and the w - 1 before it; None is
        unlimited.
        """
        ...

    def best_token(self, logits_RN: torch.Tensor, start: int) -> torch.Tensor:
        """Return each row's largest logit and its token as float32 [R, 2]; column n is token start + n.

        Of equal logits the first wins; a NaN counts as largest; a row of no columns gives minus infinity. Tokens stay
        below 2^24, where float32 is exact.
        """
        ...

    def choose_token(self, best_RX2: torch.Tensor) -> torch.Tensor:
        """Return the token [R] int64 of the best pair of each row [R, ranks, 2], -1 where that logit is not finite."""
        ...
