"""Every operation in plain torch: the definition that other kernels are measured against, and `fast` on CPU.

Shape suffixes as in base.py; also L = positions of the longest sequence in a group, C = tokens of one sequence.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.kernels.choice import TorchChoice

FUNCTIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "none": torch.clone,
}
"""What `Kernels.activation` means by each name."""


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences with equally many tokens in the step, which attend in one call.

    `tokens` [B, C]: rows of the step; `positions` [B, C]; `slots` [B, L]: where keys 0 … L - 1 lie, those past a
    sequence's last token standing for its last one, so that no stale number of the cache is ever read.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def mask(self, window: int | None) -> torch.Tensor:
        """Return bool [B, 1, C, L]: which keys a token may see."""
        keys = torch.arange(self.slots.shape[1], device=self.slots.device)
        last = self.positions[:, None, :, None]
        seen = keys <= last
        return seen if window is None else seen & (keys > last - window)


def group_sequences(inputs: AttentionInputs, block_size: int) -> list[SequenceGroup]:
    """Group the step's sequences by their number of tokens: all that decode in one, usually one a prompt."""
    ids, counts = torch.unique_consecutive(inputs.sequence_ids, return_counts=True)
    starts = counts.cumsum(0) - counts
    groups = []
    for count in counts.unique().tolist():
        chosen = counts == count
        tokens = starts[chosen][:, None] + torch.arange(count, device=starts.device)
        positions = inputs.positions[tokens]
        last = positions[:, -1:]
        keys = torch.minimum(torch.arange(int(last.max()) + 1, device=last.device), last)
        blocks = inputs.block_tables[ids[chosen][:, None], keys // block_size].long()
        groups.append(SequenceGroup(tokens, positions, blocks * block_size + keys % block_size))
    return groups


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by position, halves together."""
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TD.to(x_THD.dtype)[:, None], sin_TD.to(x_THD.dtype)[:, None]
    return x_THD * cos + torch.cat((-second, first), dim=-1) * sin


class TorchKernels(TorchChoice):
    """The `Kernels` protocol in torch's own operators; results are equal within rounding from batch to batch."""

    activation_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self._grouped: tuple[AttentionInputs, list[SequenceGroup]] | None = None

    def prepare(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the weight [N, K] itself, contiguous."""
        return weight_NK.contiguous()

    def linear(self, x_TK: torch.Tensor, weight: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N]."""
        return functional.linear(x_TK, weight, bias_N)

    def embedding(self, ids_T: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
        """Return the rows [T, K] of the ids in start … start + N - 1, zeros for the others."""
        if weight.shape[0] == 0:
            return weight.new_zeros(ids_T.shape[0], weight.shape[1])
        local = ids_T - start
        known = (local >= 0) & (local < weight.shape[0])
        return weight[torch.where(known, local, 0)].masked_fill_(~known[:, None], 0)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float32."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return weight * (x32 * scale).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K] and its `rms_norm`."""
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def prepare_gated(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> torch.Tensor:
        """Return gate and up as one weight [2N, K]."""
        return torch.cat((gate_NK, up_NK))

    def gated_linear(
        self, x_TK: torch.Tensor, weight: torch.Tensor, bias_2N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]."""
        gate_TN, up_TN = self.linear(x_TK, weight, bias_2N).chunk(2, dim=-1)
        return functional.silu(gate_TN) * up_TN

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: AttentionHeads,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Return q [T, H, D], rotated; store k, rotated, and v [T, G, D] in the caches [P, S, G, D] at their slots."""
        by_head = qkv.unflatten(-1, (-1, heads.head_dim))
        q_THD, k_TGD, v_TGD = by_head.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q_THD = self.rms_norm(q_THD, heads.q_norm, heads.norm_eps)
            k_TGD = self.rms_norm(k_TGD, heads.k_norm, heads.norm_eps)
        for stored, new in zip(cache, (_rotate(k_TGD, *rotation), v_TGD), strict=True):
            stored.flatten(0, 1)[inputs.slots] = new.to(stored.dtype)
        return _rotate(q_THD, *rotation)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        return FUNCTIONS[name](x)

    def attention(
        self,
        q_THD: torch.Tensor,
        cache: Cache,
        heads: AttentionHeads,
        inputs: AttentionInputs,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention [T, H, D] of each token over its own sequence."""
        keys, values = (stored.flatten(0, 1) for stored in cache)
        result = torch.empty_like(q_THD)
        for group in self._groups(inputs, cache[0].shape[1]):
            places = group.slots[:, None], heads.kv_index[:, None]
            k_BHLD, v_BHLD = keys[places], values[places]
            q_BHCD = q_THD[group.tokens].transpose(1, 2)
            mask = group.mask(window)
            y = functional.scaled_dot_product_attention(q_BHCD, k_BHLD, v_BHLD, attn_mask=mask)
            result[group.tokens] = y.transpose(1, 2)
        return result

    def _groups(self, inputs: AttentionInputs, block_size: int) -> list[SequenceGroup]:
        # All layers of a step pass the same object: grouping it once leaves one wait for the device per step.
        if self._grouped is None or self._grouped[0] is not inputs:
            self._grouped = inputs, group_sequences(inputs, block_size)
        return self._grouped[1]
