"""The likeliest token of a vocabulary that is split over the ranks, and its way into the next step.

R = rows, N = columns of this rank, C = chunks of a row. A NaN counts as largest, as in torch.
"""

import torch
import triton
import triton.language as tl

from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, wait_for_inputs

CHUNK = 4096
"""Columns of a program."""


@triton.jit
def _first_largest(values, places):
    """Return the largest of the values and the lowest of the places that hold it."""
    is_nan = values != values
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    place = tl.min(tl.where(tl.where(any_nan, is_nan, values == top), places, 2147483647), 0)
    return tl.where(any_nan, float("nan"), top), place


@triton.jit
def _chunk_kernel(x, tops, places, N, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Find the largest logit of one chunk of a row."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + row * N + columns, mask=columns < N, other=float("-inf")).to(tl.float32)
    top, column = _first_largest(values, columns)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(places + row * chunks + chunk, tl.minimum(column, N - 1))


@triton.jit
def _best_kernel(tops, places, best, start, CHUNKS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Join the chunks of a row."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    top_C = tl.load(tops + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    place_C = tl.load(places + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=2147483647)
    top, column = _first_largest(top_C, place_C)
    tl.store(best + row * 2, top)
    tl.store(best + row * 2 + 1, (column + start).to(tl.float32))


@triton.jit
def _choose_kernel(best, tokens, RANKS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Take the best rank's token of one row."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK)
    values = tl.load(best + (row * RANKS + rank) * 2, mask=rank < RANKS, other=float("-inf"))
    top, owner = _first_largest(values, rank)
    token = tl.load(best + (row * RANKS + owner) * 2 + 1).to(tl.int64)
    tl.store(tokens + row, tl.where(tl.abs(top) < float("inf"), token, -1))


@triton.jit
def _resolve_kernel(ids, last, resolved, PDL: tl.constexpr):
    """Put a token in the place of one reference."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    token = tl.load(ids + row)
    if token < 0:
        token = tl.load(last - 1 - token)
    tl.store(resolved + row, token)


def best_token(logits_RN: torch.Tensor, start: int) -> torch.Tensor:
    """Return each row's largest logit and its token, start + column, as float32 [R, 2]; N is at least 1."""
    rows, width = logits_RN.shape
    chunks = triton.cdiv(width, CHUNK)
    best = logits_RN.new_empty(rows, 2, dtype=torch.float32)
    tops = logits_RN.new_empty(rows, chunks, dtype=torch.float32)
    places = logits_RN.new_empty(rows, chunks, dtype=torch.int32)
    if rows:
        _chunk_kernel[(rows, chunks)](logits_RN, tops, places, width, CHUNK=CHUNK, num_warps=4, **launch_options())
        _best_kernel[(rows,)](
            tops, places, best, start, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **launch_options()
        )
    return best


def choose_token(best_RX2: torch.Tensor) -> torch.Tensor:
    """Return the token [R] int64 of the best pair [R, ranks, 2], -1 where its logit is not finite."""
    rows, ranks, _ = best_RX2.shape
    tokens = best_RX2.new_empty(rows, dtype=torch.int64)
    if rows:
        block = triton.next_power_of_2(ranks)
        _choose_kernel[(rows,)](best_RX2, tokens, ranks, BLOCK=block, num_warps=1, **launch_options())
    return tokens


def resolve(ids_T: torch.Tensor, last_R: torch.Tensor) -> torch.Tensor:
    """Return ids [T] int64 with `last[r]` in the place of -1 - r."""
    resolved = torch.empty_like(ids_T)
    if len(ids_T):
        _resolve_kernel[(len(ids_T),)](ids_T, last_R, resolved, num_warps=1, **launch_options())
    return resolved
