"""Attention over the paged cache, for one token a sequence or many, with one fixed order of all sums.

Keys are taken in units of so many positions, counted from the start of the sequence. Inside a unit runs the online
softmax of FlashAttention (Dao et al., 2022), block after block; the units' results are joined in order, by the same
online rule. Whether one program walks all units of its rows (long prompts) or each unit has a program and a second
kernel joins them (split-KV, as in Flash-Decoding; Dao et al., 2023) changes no bit, and neither does the number of
rows that share a program: products put keys and values on the left, rows side by side on the right.

Shape suffix legend
  T, H, G, D, P, S as in base.py    B = sequences    M = blocks a sequence at most
  R = rows of a program, pairs of token and query head of one key/value head    U = units    L = keys of a block
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mpi_tp.kernels.base import AttentionHeads, Cache
from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, prefetch, wait_for_inputs
from mpi_tp.kernels.gpu.tiles import TiledInputs

INVARIANT_UNIT = 128
"""Keys in a unit where results must not depend on what else runs."""
LARGE_UNIT = 256
"""Keys in a unit when there are programs enough: fewer parts to join."""
KEYS = 64
"""Keys of a block inside a unit: a product on tensor cores has 64 rows."""
FLOAT32_KEYS = 16
"""The same in float32, without tensor cores: each takes its share of a minute to compile."""
MIN_ROWS = 16
"""The fewest columns that a product on tensor cores has."""
ROWS = 64
"""Rows of a program that runs several tokens of a prompt, if a token has no more."""
JOINED_ROWS = 1
"""Rows of a program that joins units."""
WORKSPACE_BYTES = 256 * 2**20
"""Most memory for the parts of split sequences; beyond, a program walks its sequence alone, to the same bits."""
FEW_PROGRAMS = 128
"""So many leave multiprocessors idle."""
PREFETCHING_PROGRAMS = 512
"""More fetch ahead what pushes out of the cache what others still need."""
AHEAD = 4
"""Units that a program which joins them reads at once."""
UNLIMITED = 2**30
"""A window wider than any sequence."""
LOWEST = tl.constexpr(-1.0e30)
"""Stands for minus infinity where a difference is taken."""


@triton.jit
def _attend_unit(
    q_DR, positions_R, keys, values, table, unit, end, block_stride, window,
    SCALE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return top [R], sum [R] and weighted values [D, R] of the unit's keys below `end`."""
    d = tl.arange(0, D_PADDED)
    top_R = tl.full((R,), LOWEST, tl.float32)
    sum_R = tl.zeros((R,), tl.float32)
    acc_DR = tl.zeros((D_PADDED, R), tl.float32)
    for start in range(unit * UNIT, min(end, unit * UNIT + UNIT), L):
        key_L = start + tl.arange(0, L)
        exists_L = key_L < end
        block_L = tl.load(table + key_L // S, mask=exists_L, other=0).to(tl.int64)
        offset_LD = (block_L * block_stride + (key_L % S) * D)[:, None] + d[None, :]
        exists_LD = exists_L[:, None] & (d < D)[None, :]
        k_LD = tl.load(keys + offset_LD, mask=exists_LD, other=0.0)
        v_LD = tl.load(values + offset_LD, mask=exists_LD, other=0.0)
        score_LR = tl.dot(k_LD, q_DR, input_precision="ieee") * SCALE
        distance_LR = positions_R[None, :] - key_L[:, None]
        score_LR = tl.where((distance_LR >= 0) & (distance_LR < window), score_LR, float("-inf"))
        new_top_R = tl.maximum(top_R, tl.max(score_LR, 0))
        shrink_R = tl.exp2(top_R - new_top_R)
        weight_LR = tl.exp2(score_LR - new_top_R[None, :])
        part_DR = tl.dot(tl.trans(v_LD), weight_LR.to(v_LD.dtype), input_precision="ieee")
        acc_DR = acc_DR * shrink_R[None, :] + part_DR
        sum_R = sum_R * shrink_R + _column_sums(weight_LR, v_LD.dtype, L)
        top_R = new_top_R
    return top_R, sum_R, acc_DR


@triton.jit
def _column_sums(weight_LR, DTYPE: tl.constexpr, L: tl.constexpr):
    """Sum each column in an order that the number of columns does not change.

    On tensor cores the layout of products fixes it. In float32 the layout varies, and only a product has one order.
    """
    if DTYPE.is_fp32():
        return tl.max(tl.dot(tl.full((16, L), 1.0, tl.float32), weight_LR, input_precision="ieee"), 0)
    return tl.sum(weight_LR, 0)


@triton.jit
def _join(top, total, acc, unit_top, unit_total, unit_acc):
    """Join a unit's result to that of the units before it."""
    new_top = tl.maximum(top, unit_top)
    keep, add = tl.exp2(top - new_top), tl.exp2(unit_top - new_top)
    return new_top, total * keep + unit_total * add, acc * keep[None, :] + unit_acc * add[None, :]


@triton.jit
def _prefetch_unit(
    keys, values, table, unit, end, block_stride,
    S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, UNIT: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Fetch a unit's keys and values while the kernel waits; what this step still writes reaches the same cache."""
    key_L = unit * UNIT + tl.arange(0, UNIT)
    block_L = tl.load(table + key_L // S, mask=key_L < end, other=0).to(tl.int64)
    line_I = tl.minimum(tl.arange(0, (D_PADDED + LINE - 1) // LINE) * LINE, D - 1)
    line_LI = (block_L * block_stride + (key_L % S) * D)[:, None] + line_I[None, :]
    prefetch(keys + line_LI)
    prefetch(values + line_LI)


@triton.jit
def _attention_kernel(
    q, keys, values, y, tops, sums, parts, tiles, head_starts, positions, tables,
    H, num_rows, table_stride, block_stride, window,
    SCALE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, UNIT: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the rows of one tile (SINGLE: of one token) and one key/value head."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start(PDL)
    first, tokens, sequence = tile, 1, tile
    if not SINGLE:
        first = tl.load(tiles + tile * 3)
        tokens = tl.load(tiles + tile * 3 + 1)
        sequence = tl.load(tiles + tile * 3 + 2)
    row_R = tl.arange(0, R)
    token_R = first + row_R // GROUP
    head_R = tl.load(head_starts + kv_head) + row_R % GROUP
    is_row_R = (row_R // GROUP < tokens) & (head_R < tl.load(head_starts + kv_head + 1))
    positions_R = tl.load(positions + token_R, mask=is_row_R, other=-1).to(tl.int32)
    end = tl.max(positions_R) + 1
    if SPLIT and (split * UNIT >= end or split * UNIT + UNIT <= end - window):
        return  # at least one program of each token has keys and waits, as those after this kernel rely on
    keys += kv_head * S * D
    values += kv_head * S * D
    table = tables + sequence.to(tl.int64) * table_stride
    if PREFETCH and PDL:
        _prefetch_unit(keys, values, table, split, end, block_stride, S, D, D_PADDED, UNIT, LINE)
    wait_for_inputs(PDL)
    d = tl.arange(0, D_PADDED)
    place_R = token_R.to(tl.int64) * H + head_R
    place_DR = place_R[None, :] * D + d[:, None]
    is_place_DR = is_row_R[None, :] & (d < D)[:, None]
    q_DR = tl.load(q + place_DR, mask=is_place_DR, other=0.0)
    if SPLIT:
        top_R, sum_R, acc_DR = _attend_unit(
            q_DR, positions_R, keys, values, table, split, end, block_stride, window,
            SCALE, S, D, D_PADDED, R, L, UNIT,
        )  # fmt: skip
        place_R += split.to(tl.int64) * num_rows
        tl.store(tops + place_R, top_R, mask=is_row_R)
        tl.store(sums + place_R, sum_R, mask=is_row_R)
        place_DR += split.to(tl.int64) * num_rows * D
        tl.store(parts + place_DR, acc_DR, mask=is_place_DR)
    else:
        top_R = tl.full((R,), LOWEST, tl.float32)
        sum_R = tl.zeros((R,), tl.float32)
        acc_DR = tl.zeros((D_PADDED, R), tl.float32)
        lowest = tl.min(tl.where(is_row_R, positions_R, end)) - window + 1
        for unit in range(tl.maximum(lowest, 0) // UNIT, tl.cdiv(end, UNIT)):
            unit_top_R, unit_sum_R, unit_acc_DR = _attend_unit(
                q_DR, positions_R, keys, values, table, unit, end, block_stride, window,
                SCALE, S, D, D_PADDED, R, L, UNIT,
            )  # fmt: skip
            top_R, sum_R, acc_DR = _join(top_R, sum_R, acc_DR, unit_top_R, unit_sum_R, unit_acc_DR)
        tl.store(y + place_DR, (acc_DR / sum_R[None, :]).to(y.dtype.element_ty), mask=is_place_DR)


@triton.jit(do_not_specialize=["num_rows"])  # or it has no type where it is 1
def _join_kernel(
    tops, sums, parts, y, positions, H, num_rows, window,
    D: tl.constexpr, D_PADDED: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Join the units of R pairs of token and head, each in order; AHEAD units are read at once."""
    let_next_start(PDL)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    is_row_R = row_R < num_rows
    position_R = tl.load(positions + row_R // H, mask=is_row_R, other=-1).to(tl.int32)
    last_R = position_R // UNIT
    d = tl.arange(0, D_PADDED)
    place_DR = row_R[None, :] * D + d[:, None]
    is_place_DR = is_row_R[None, :] & (d < D)[:, None]
    top_R = tl.full((R,), LOWEST, tl.float32)
    sum_R = tl.zeros((R,), tl.float32)
    acc_DR = tl.zeros((D_PADDED, R), tl.float32)
    wait_for_inputs(PDL)
    lowest = tl.min(tl.where(is_row_R, position_R, 2147483647)) - window + 1
    for first in range(tl.maximum(lowest, 0) // UNIT, tl.max(last_R) + 1, AHEAD):
        for ahead in tl.static_range(AHEAD):
            unit = first + ahead
            exists_R = is_row_R & (unit <= last_R)
            skipped = num_rows.to(tl.int64) * unit
            unit_top_R = tl.load(tops + skipped + row_R, mask=exists_R, other=LOWEST)
            unit_sum_R = tl.load(sums + skipped + row_R, mask=exists_R, other=0.0)
            part_DR = tl.load(parts + skipped * D + place_DR, mask=is_place_DR & exists_R[None, :], other=0.0)
            top_R, sum_R, acc_DR = _join(top_R, sum_R, acc_DR, unit_top_R, unit_sum_R, part_DR)
    tl.store(y + place_DR, (acc_DR / sum_R[None, :]).to(y.dtype.element_ty), mask=is_place_DR)


def attend(
    q_THD: torch.Tensor, cache: Cache, heads: AttentionHeads, inputs: TiledInputs, window: int | None, unit: int
) -> torch.Tensor:
    """Return causal attention [T, H, D] of each token over its own sequence, summed in units of `unit` keys."""
    call = _Call(q_THD, cache, heads, inputs, window or UNLIMITED, torch.empty_like(q_THD))
    if inputs.num_single:
        call.attend_single(unit)
    if len(inputs.tiles):
        call.launch(len(inputs.tiles), rows_of_prompts(heads), unit, 1, single=False, partial=None)
    return call.y_THD


def tokens_per_tile(heads: AttentionHeads) -> int:
    """Return how many tokens of a prompt share a program."""
    return rows_of_prompts(heads) // triton.next_power_of_2(heads.largest_group)


def rows_of_prompts(heads: AttentionHeads) -> int:
    """Return the rows of a program that runs tokens of a prompt: those of one token at least."""
    return max(ROWS, triton.next_power_of_2(heads.largest_group))


def fastest_unit(num_single: int, num_kv_heads: int, longest: int) -> int:
    """Return the keys of a unit that make programs enough of few sequences, and no more of many."""
    if num_single * num_kv_heads > FEW_PROGRAMS:
        return LARGE_UNIT
    return 64 if longest <= 512 else 128


@dataclass(frozen=True)
class _Call:
    """The arguments of one attention."""

    q_THD: torch.Tensor
    cache: Cache
    heads: AttentionHeads
    inputs: TiledInputs
    window: int
    y_THD: torch.Tensor

    def attend_single(self, unit: int) -> None:
        """Attend with the tokens that are alone in their sequence; long sequences are split over programs."""
        count, heads, width = self.inputs.num_single, self.heads.num_heads, self.heads.head_dim
        units = triton.cdiv(self.inputs.longest, unit)
        if 4 * units * count * heads * width > WORKSPACE_BYTES:
            units = 1
        rows = max(triton.next_power_of_2(self.heads.largest_group), MIN_ROWS)
        if units == 1:
            self.launch(count, rows, unit, 1, single=True, partial=None)
            return
        tops, sums = self.q_THD.new_empty(2, units, count * heads, dtype=torch.float32)
        parts = self.q_THD.new_empty(units, count * heads, width, dtype=torch.float32)
        self.launch(count, rows, unit, units, single=True, partial=(tops, sums, parts))
        _join_kernel[(triton.cdiv(count * heads, JOINED_ROWS),)](
            tops, sums, parts, self.y_THD, self.inputs.positions, heads, count * heads, self.window,
            D=width, D_PADDED=triton.next_power_of_2(width), R=JOINED_ROWS, UNIT=unit, AHEAD=AHEAD,
            num_warps=1, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip

    def launch(
        self, count: int, rows: int, unit: int, units: int, *, single: bool,
        partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Start a program a tile, key/value head and unit; `units` 1 means that a program walks them all."""
        keys, values = self.cache
        heads, inputs, width = self.heads, self.inputs, self.heads.head_dim
        _attention_kernel[(count, heads.num_kv_heads, units)](
            self.q_THD, keys, values, self.y_THD, *(partial or (self.y_THD,) * 3), inputs.tiles, heads.head_starts,
            inputs.positions, inputs.block_tables, heads.num_heads, count * heads.num_heads,
            inputs.block_tables.stride(0), keys.stride(0), self.window,
            SCALE=width**-0.5 * math.log2(math.e), S=keys.shape[1], D=width,
            D_PADDED=max(triton.next_power_of_2(width), MIN_ROWS), GROUP=triton.next_power_of_2(heads.largest_group),
            R=rows, L=FLOAT32_KEYS if keys.itemsize == 4 else min(KEYS, unit), UNIT=unit,
            SINGLE=single, SPLIT=units > 1,
            PREFETCH=single and count * heads.num_kv_heads * units <= PREFETCHING_PROGRAMS, LINE=128 // keys.itemsize,
            num_warps=4, num_stages=2, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
