"""Grouped-query attention, whole heads to a rank.

Shape suffix legend
  T = packed tokens of all sequences in the step    K = model dimension    D = head dimension
  H = query heads of this rank    G = key/value heads of this rank
"""

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.kernels.base import AttentionInputs, Cache
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.linear import ColumnParallelLinear, second_linear
from mpi_tp.layers.norm import RMSNorm
from mpi_tp.partition.ranges import KeyValueHeads


class Attention:
    """Causal self-attention over the paged cache: x [T, K] to [T, K]."""

    def __init__(self, context: LayerContext, name: str, config: ModelConfig) -> None:
        comm = context.comm
        kv_heads = KeyValueHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        query_plan = context.plan[f"{name}.q_proj.weight"]
        self._kernels = context.kernels
        self._head_dim = config.head_dim
        self._window = config.sliding_window
        self._qkv_proj = ColumnParallelLinear(context, f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self._o_proj = second_linear(context, f"{name}.o_proj", query_plan.sizes)
        self._q_norm = RMSNorm(context, f"{name}.q_norm", config.rms_norm_eps) if config.qk_norm else None
        self._k_norm = RMSNorm(context, f"{name}.k_norm", config.rms_norm_eps) if config.qk_norm else None
        self._kv_index = torch.tensor(kv_heads.index(comm.rank, comm.size), dtype=torch.int64, device=context.device)

    def __call__(
        self, x_TK: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], inputs: AttentionInputs, cache: Cache
    ) -> torch.Tensor:
        """Store the tokens' keys and values in `cache` and return what they attend to, [T, K].

        `rotation` holds the cosines and sines [T, D] of the tokens' positions.
        """
        q, k, v = self._qkv_proj(x_TK).split(self._qkv_proj.output_sizes, dim=-1)
        q_THD, k_TGD, v_TGD = (part.unflatten(-1, (-1, self._head_dim)) for part in (q, k, v))
        if self._q_norm and self._k_norm:
            q_THD, k_TGD = self._q_norm(q_THD), self._k_norm(k_TGD)
        q_THD = self._kernels.rotary(q_THD, *rotation)
        k_TGD = self._kernels.rotary(k_TGD, *rotation)
        self._kernels.write_kv(k_TGD, v_TGD, cache, inputs.slots)
        scale = self._head_dim**-0.5
        y_THD = self._kernels.attention(q_THD, cache, self._kv_index, inputs, scale, self._window)
        return self._o_proj(y_THD.flatten(1))
