"""Kernels whose results do not depend on the batch, the rank count or the schedule: the CPU's default.

The bits of a row of a result depend on that row and the weights alone. Activations and the key/value cache are
float32 whatever the weights; float32 and bfloat16 weights stay as they are, float16 ones are widened (exactly).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from mpi_tp.kernels import invariant_attention, invariant_linear, invariant_rows
from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.kernels.choice import TorchChoice
from mpi_tp.kernels.simd import LANES

NO_NORM = np.empty(0, np.float32)
"""Stands for the weight of a norm that the model does not have."""
UNLIMITED = 2**62
"""A window wider than any sequence."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] as tiles [N / LANES rounded up, K, LANES], float32 or bfloat16."""

    tiles: torch.Tensor
    size: int
    """N, without the zero rows that fill the last tile."""
    array: Any
    """The memory of the tiles as numpy sees it, bfloat16 as uint16."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [len(ids), K] in float32."""
        return self.tiles[ids // LANES, :, ids % LANES].float()


def _by_head(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of keys and values, declared as [P, S, G, D], as [P, G, D, S] and [P, G, S, D]."""
    keys, values = cache
    blocks, size, heads, width = keys.shape
    return keys.view(blocks, heads, width, size), values.view(blocks, heads, size, width)


def _multiply(x_TK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Return x · weightᵀ + bias, with a column for each of the weight's rows and for those that fill the last tile."""
    y_TN = torch.zeros(x_TK.shape[0], weight.tiles.shape[0] * LANES)
    bfloat16 = weight.tiles.dtype == torch.bfloat16
    multiply = invariant_linear.multiply_bfloat16 if bfloat16 else invariant_linear.multiply_float32
    multiply(_array(x_TK), weight.array, y_TN.numpy())
    if bias_N is not None:
        y_TN[:, : weight.size] += bias_N
    return y_TN


def _array(x: torch.Tensor) -> Any:
    return x.contiguous().numpy()


class InvariantKernels(TorchChoice):
    """The `Kernels` protocol in loops compiled for this CPU, one thread a rank."""

    activation_dtype: torch.dtype | None = torch.float32

    def prepare(self, weight_NK: torch.Tensor) -> PackedWeight:
        """Return the weight [N, K] in tiles."""
        size, inputs = weight_NK.shape
        weight_NK = weight_NK if weight_NK.dtype == torch.bfloat16 else weight_NK.float()
        filled = functional.pad(weight_NK, (0, 0, 0, -size % LANES))
        tiles = filled.view(-(-size // LANES), LANES, inputs).transpose(1, 2).contiguous()
        array = (tiles.view(torch.uint16) if tiles.dtype == torch.bfloat16 else tiles).numpy()
        return PackedWeight(tiles, size, array)

    def prepare_gated(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> PackedWeight:
        """Return gate and up as one weight [2N, K] in tiles."""
        return self.prepare(torch.cat((gate_NK, up_NK)))

    def linear(self, x_TK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N]."""
        return _multiply(x_TK, weight, bias_N)[:, : weight.size].contiguous()

    def gated_linear(
        self, x_TK: torch.Tensor, weight: PackedWeight, bias_2N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]."""
        y_TN = torch.empty(x_TK.shape[0], weight.size // 2)
        invariant_rows.gate(_multiply(x_TK, weight, bias_2N).numpy(), y_TN.numpy())
        return y_TN

    def embedding(self, ids_T: torch.Tensor, weight: PackedWeight, start: int) -> torch.Tensor:
        """Return the rows [T, K] of the ids in start … start + N - 1, zeros for the others."""
        known = (ids_T >= start) & (ids_T < start + weight.size)
        y_TK = torch.zeros(ids_T.shape[0], weight.tiles.shape[1])
        y_TK[known] = weight.rows(ids_T[known] - start)
        return y_TK

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float64."""
        y = torch.empty(x.shape)
        rows = -1, x.shape[-1]
        invariant_rows.rms_norm(_array(x.reshape(rows)), _array(weight.float()), eps, y.view(rows).numpy())
        return y

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K], which overwrites x, and its `rms_norm`."""
        x, y = x.contiguous(), torch.empty(x.shape)
        invariant_rows.add_rms_norm(x.numpy(), _array(delta), _array(weight.float()), eps, y.numpy())
        return x, y

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        if name in ("relu", "none"):
            return x.relu() if name == "relu" else x.clone()
        y = torch.empty(x.shape)
        loops = {"gelu": invariant_rows.gelu, "silu": invariant_rows.silu, "tanh": invariant_rows.tanh}
        loops[name](_array(x.reshape(-1)), y.view(-1).numpy())
        return y

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: AttentionHeads,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """Return q [T, H, D], rotated; store k, rotated, and v in the cache.

        Inside a block, keys are kept in the order [G, D, S], values as [G, S, D].
        """
        q_THD = torch.empty(len(qkv), heads.num_heads, heads.head_dim)
        norms = (NO_NORM if norm is None else _array(norm.float()) for norm in (heads.q_norm, heads.k_norm))
        places = (part.numpy() for part in _by_head(cache))
        invariant_attention.rotate_and_store(
            _array(qkv), *norms, heads.norm_eps, *map(_array, rotation), _array(inputs.slots), q_THD.numpy(), *places
        )
        return q_THD

    def attention(
        self,
        q_THD: torch.Tensor,
        cache: Cache,
        heads: AttentionHeads,
        inputs: AttentionInputs,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention [T, H, D] of each token over its own sequence."""
        y_THD = torch.zeros(q_THD.shape)
        keys_PGDS, values_PGSD = _by_head(cache)
        size, width = values_PGSD.shape[2:]
        fits = size % LANES == width % LANES == 0
        attend = invariant_attention.attend if fits else invariant_attention.attend_any
        where = (heads.kv_index, inputs.positions, inputs.sequence_ids, inputs.block_tables)
        limit = UNLIMITED if window is None else window
        attend(
            _array(q_THD),
            keys_PGDS.numpy(),
            values_PGSD.numpy(),
            *map(_array, where),
            heads.head_dim**-0.5,
            limit,
            y_THD.numpy(),
        )
        return y_THD
