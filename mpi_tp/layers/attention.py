"""Grouped-query attention, whole heads to a rank.

Shape suffix legend
  T = packed tokens of all sequences in the step    K = model dimension    H = query heads of this rank
  D = head dimension
"""

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import ColumnParallelLinear, second_linear
from mpi_tp.partition.ranges import KeyValueHeads


class Attention:
    """Causal self-attention over the paged cache: x [T, K] to [T, K]."""

    def __init__(self, context: LayerContext, name: str, config: ModelConfig) -> None:
        comm = context.comm
        kv_heads = KeyValueHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        start, stop = kv_heads.heads(comm.rank, comm.size)
        dtype = context.kernels.activation_dtype
        self._kernels = context.kernels
        self._window = config.sliding_window
        self._qkv_proj = ColumnParallelLinear(context, f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.heads = AttentionHeads(
            kv_index=torch.tensor(kv_heads.index(comm.rank, comm.size), dtype=torch.int64, device=context.device),
            num_kv_heads=stop - start,
            head_dim=config.head_dim,
            q_norm=context.take(f"{name}.q_norm.weight").to(dtype=dtype) if config.qk_norm else None,
            k_norm=context.take(f"{name}.k_norm.weight").to(dtype=dtype) if config.qk_norm else None,
            norm_eps=config.rms_norm_eps,
        )
        self._o_proj = second_linear(context, f"{name}.o_proj", context.plan[f"{name}.q_proj.weight"].sizes)

    def __call__(
        self, x_TK: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], inputs: AttentionInputs, cache: Cache
    ) -> torch.Tensor:
        """Store the tokens' keys and values in `cache` and return what they attend to, [T, K].

        `rotation` holds the cosines and sines [T, D] of the tokens' positions.
        """
        qkv = self._qkv_proj(x_TK)
        q_THD = self._kernels.rotate_and_store(qkv, self.heads, rotation, cache, inputs)
        y_THD = self._kernels.attention(q_THD, cache, self.heads, inputs, self._window)
        return self._o_proj(y_THD.flatten(1))
