"""Kernels whose results do not depend on the batch, the rank count or the schedule: the CPU's default.

The bits of a row of a result depend on that row and the weights alone. Activations and the key/value cache are
float32 whatever the weights; float32 and bfloat16 weights stay as they are, float16 ones are widened (exactly).
"""

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from mpi_tp.kernels import invariant_attention, invariant_linear, invariant_rows, invariant_tokens
from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.kernels.vectors import LANES

UNLIMITED = 2**62
"""A window wider than any sequence."""
NO_BIAS = 0, 0


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] as tiles [N / LANES rounded up, K, LANES], float32 or bfloat16.

    Of gate and up, each [N, K], there are twice as many tiles, in turns.
    """

    tiles: torch.Tensor
    size: int
    """N, without the zero rows that fill the last tile."""

    @functools.cached_property
    def padded_size(self) -> int:
        """N rounded up to whole tiles."""
        return -(-self.size // LANES) * LANES

    @functools.cached_property
    def arguments(self) -> tuple[int, int, int, int]:
        """K, the number of tiles, bytes a number and address, as the kernels take them."""
        tiles, inputs, _ = self.tiles.shape
        return inputs, tiles, self.tiles.element_size(), self.tiles.data_ptr()


@dataclass(frozen=True)
class _Step:
    """The tensors of a step's `AttentionInputs`, dense, and what the attention takes of them."""

    inputs: AttentionInputs
    positions: torch.Tensor
    sequence_ids: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    arguments: tuple[int, ...]

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Step":
        ints = (part.long().contiguous() for part in (inputs.positions, inputs.sequence_ids, inputs.slots))
        positions, sequence_ids, slots = ints
        tables = inputs.block_tables.int().contiguous()
        arguments = *tables.shape, positions.data_ptr(), sequence_ids.data_ptr(), tables.data_ptr()
        return cls(inputs, positions, sequence_ids, tables, slots, arguments)


def _floats(x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, which must be float32: kernels see an address only."""
    assert x.dtype is torch.float32, f"float32 wanted, not {x.dtype}"
    return x.contiguous()


def _cut(y_TM: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return y without the columns that fill the last tile."""
    return y_TM if weight.padded_size == weight.size else y_TM[:, : weight.size].contiguous()


def _tiles(weight_NK: torch.Tensor) -> torch.Tensor:
    size, inputs = weight_NK.shape
    weight_NK = weight_NK if weight_NK.dtype == torch.bfloat16 else weight_NK.float()
    filled = functional.pad(weight_NK, (0, 0, 0, -size % LANES))
    return filled.view(-(-size // LANES), LANES, inputs).transpose(1, 2)


class InvariantKernels:
    """The `Kernels` protocol in loops compiled for this CPU, one thread a rank."""

    activation_dtype: torch.dtype | None = torch.float32

    def __init__(self) -> None:
        self._step: _Step | None = None

    def prepare(self, weight_NK: torch.Tensor) -> PackedWeight:
        """Return the weight [N, K] in tiles."""
        return PackedWeight(_tiles(weight_NK).contiguous(), len(weight_NK))

    def prepare_gated(self, gate_NK: torch.Tensor, up_NK: torch.Tensor) -> PackedWeight:
        """Return gate and up, [N, K] each, in tiles that take turns."""
        tiles = torch.stack((_tiles(gate_NK), _tiles(up_NK)), dim=1).flatten(0, 1)
        return PackedWeight(tiles, len(gate_NK))

    def linear(self, x_TK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · weightᵀ + bias [T, N]."""
        x_TK, y_TM = _floats(x_TK), torch.empty(x_TK.shape[0], weight.padded_size)
        bias = NO_BIAS
        if bias_N is not None:
            bias_M = functional.pad(bias_N.float(), (0, weight.padded_size - weight.size)).contiguous()
            bias = 1, bias_M.data_ptr()
        invariant_linear.multiply(x_TK.shape[0], x_TK.data_ptr(), *weight.arguments, *bias, y_TM.data_ptr())
        return _cut(y_TM, weight)

    def gated_linear(
        self, x_TK: torch.Tensor, weight: PackedWeight, bias_2N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(x · gateᵀ) * (x · upᵀ) [T, N]."""
        x_TK, y_TM = _floats(x_TK), torch.empty(x_TK.shape[0], weight.padded_size)
        bias = NO_BIAS
        if bias_2N is not None:
            padded = functional.pad(bias_2N.float().view(2, -1), (0, weight.padded_size - weight.size))
            bias_2M = padded.view(2, -1, LANES).transpose(0, 1).contiguous()
            bias = 1, bias_2M.data_ptr()
        invariant_linear.multiply_gated(x_TK.shape[0], x_TK.data_ptr(), *weight.arguments, *bias, y_TM.data_ptr())
        return _cut(y_TM, weight)

    def embedding(self, ids_T: torch.Tensor, weight: PackedWeight, start: int) -> torch.Tensor:
        """Return the rows [T, K] of the ids in start … start + N - 1, zeros for the others."""
        ids_T = ids_T.long().contiguous()
        y_TK = torch.empty(len(ids_T), weight.tiles.shape[1])
        invariant_linear.embed(len(ids_T), ids_T.data_ptr(), *weight.arguments, start, weight.size, y_TK.data_ptr())
        return y_TK

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float64."""
        x, weight, y = _floats(x), _floats(weight.float()), torch.empty(x.shape)
        width = x.shape[-1]
        invariant_rows.rms_norm(x.numel() // width, width, x.data_ptr(), weight.data_ptr(), eps, y.data_ptr())
        return y

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta [T, K], which overwrites x, and its `rms_norm`."""
        x, delta, weight, y = _floats(x), _floats(delta), _floats(weight.float()), torch.empty(x.shape)
        addresses = x.data_ptr(), delta.data_ptr(), weight.data_ptr()
        invariant_rows.add_rms_norm(*x.shape, *addresses, eps, y.data_ptr())
        return x, y

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return relu, gelu (exact, by erf), silu, tanh or none of x."""
        if name in ("relu", "none"):
            return x.relu() if name == "relu" else x.clone()
        x, y = _floats(x), torch.empty(x.shape)
        loops = {"gelu": invariant_rows.gelu, "silu": invariant_rows.silu, "tanh": invariant_rows.tanh}
        loops[name](x.numel(), x.data_ptr(), y.data_ptr())
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

        Inside a block of the cache, keys are kept in the order [G, D, S], values as [G, S, D].
        """
        qkv, cos, sin = _floats(qkv), *map(_floats, rotation)
        q_THD = torch.empty(len(qkv), heads.num_heads, heads.head_dim)
        norms = [_floats(norm.float()) for norm in (heads.q_norm, heads.k_norm) if norm is not None]
        norm_addresses = [norm.data_ptr() for norm in norms] or [0, 0]
        keys, values = cache
        invariant_attention.rotate_and_store(
            *q_THD.shape,
            keys.shape[0],
            heads.num_kv_heads,
            keys.shape[1],
            qkv.data_ptr(),
            len(norms),
            *norm_addresses,
            heads.norm_eps,
            cos.data_ptr(),
            sin.data_ptr(),
            self._step_of(inputs).slots.data_ptr(),
            q_THD.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
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
        q_THD, y_THD = _floats(q_THD), torch.empty(q_THD.shape)
        keys, values = cache
        invariant_attention.attend(
            *q_THD.shape,
            keys.shape[0],
            heads.num_kv_heads,
            keys.shape[1],
            q_THD.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            heads.head_starts.data_ptr(),
            *self._step_of(inputs).arguments,
            heads.head_dim**-0.5,
            UNLIMITED if window is None else window,
            y_THD.data_ptr(),
        )
        return y_THD

    def best_token(self, logits_RN: torch.Tensor, start: int) -> torch.Tensor:
        """Return each row's largest logit and its token [R, 2], the first of equals."""
        logits_RN, best_R2 = _floats(logits_RN), torch.empty(len(logits_RN), 2)
        invariant_tokens.best_token(*logits_RN.shape, start, logits_RN.data_ptr(), best_R2.data_ptr())
        return best_R2

    def choose_token(self, best_RX2: torch.Tensor) -> torch.Tensor:
        """Return the token [R] of the best pair [R, ranks, 2], -1 where its logit is not finite."""
        best_RX2, tokens_R = _floats(best_RX2), torch.empty(len(best_RX2), dtype=torch.int64)
        invariant_tokens.choose_token(*best_RX2.shape[:2], best_RX2.data_ptr(), tokens_R.data_ptr())
        return tokens_R

    def _step_of(self, inputs: AttentionInputs) -> _Step:
        # All layers of a step pass the same object, and ranks that are threads share these kernels.
        step = self._step
        if step is None or step.inputs is not inputs:
            self._step = step = _Step.of(inputs)
        return step
