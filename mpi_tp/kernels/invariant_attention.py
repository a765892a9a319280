"""Causal attention over the paged cache: each token's sums run over its own keys, in order.

A sequence's tokens and the query heads that share a key/value head go through the keys together, CHUNK keys at a time,
as rows of a product held in registers. Who goes along never changes a row's bits: every score is a sum over the head
dimension, every output a sum over exactly the keys that the token sees, both in order.

Shape suffix legend
  T, H, G, D, P, S as in base.py    C = tokens of one sequence, taken together    E = query heads that share a key head
  R = C * E rows    L = keys, from a multiple of CHUNK
"""

from typing import Any

import numba
import numpy as np

from mpi_tp.kernels.invariant_rows import exp_and_sum, largest
from mpi_tp.kernels.jit import kernel
from mpi_tp.kernels.simd import LANES, tile_product

Array = np.ndarray[Any, Any]

CHUNK = 64
"""Keys copied next to each other at a time."""
TOKENS = 8
"""Tokens of one sequence taken together."""


@numba.njit
def _gather_keys(keys_PSD: Array, table: Array, start: int, end: int, tiles: Array) -> None:
    # tiles [CHUNK / LANES, D, LANES]: keys side by side
    size, width = keys_PSD.shape[1:]
    for key in range(start, end):
        tile, lane = divmod(key - start, LANES)
        for d in range(width):
            tiles[tile, d, lane] = keys_PSD[table[key // size], key % size, d]


@numba.njit
def _gather_values(values_PSD: Array, table: Array, start: int, end: int, tiles: Array) -> None:
    # tiles [D / LANES, CHUNK, LANES]: parts of a value side by side
    size, width = values_PSD.shape[1:]
    for key in range(start, end):
        for d in range(width):
            tiles[d // LANES, key - start, d % LANES] = values_PSD[table[key // size], key % size, d]


@numba.njit
def _score(q_RD: Array, keys_PSD: Array, table: Array, base: int, end: int) -> Array:
    """Return the products of queries and keys base … end - 1, [R, L]."""
    rows, width = q_RD.shape
    scores_RL = np.zeros((rows, (end - base + CHUNK - 1) // CHUNK * CHUNK), np.float32)
    tiles = np.zeros((CHUNK // LANES, width, LANES), np.float32)
    for start in range(base, end, CHUNK):
        _gather_keys(keys_PSD, table, start, min(start + CHUNK, end), tiles)
        for tile in range(CHUNK // LANES):
            tile_product(1, 0, q_RD, tiles[tile:], scores_RL[:, start - base + tile * LANES :])
    return scores_RL


@numba.njit
def _add_values(weights_RL: Array, tiles: Array, y_RD: Array) -> None:
    for tile in range(tiles.shape[0]):
        tile_product(1, 1, weights_RL, tiles[tile:], y_RD[:, tile * LANES :])


@numba.njit
def _average(weights_RL: Array, values_PSD: Array, table: Array, base: int, seen: Array, y_RD: Array) -> None:
    """Add values by weight to y; `seen` [C, 2] holds the first key that a token sees and the one past its last."""
    tokens = seen.shape[0]
    heads = weights_RL.shape[0] // tokens
    tiles = np.zeros((y_RD.shape[1] // LANES, CHUNK, LANES), np.float32)
    for start in range(base, seen[-1, 1], CHUNK):
        end = start + CHUNK
        _gather_values(values_PSD, table, start, min(end, seen[-1, 1]), tiles)
        # Tokens that see the whole chunk follow one another: each bound of what is seen grows with the position.
        whole = 0
        for token in range(tokens):
            low, high = max(seen[token, 0], start), min(seen[token, 1], end)
            if low == start and high == end:
                whole += 1
            elif low < high:
                rows = slice(token * heads, (token + 1) * heads)
                _add_values(
                    weights_RL[rows, low - base : high - base], tiles[:, low - start : high - start], y_RD[rows]
                )
        if whole:
            first = 0
            while seen[first, 1] < end:
                first += 1
            rows = slice(first * heads, (first + whole) * heads)
            _add_values(weights_RL[rows, start - base : end - base], tiles, y_RD[rows])


@numba.njit
def _attend_together(
    q_CED: Array, keys_PSD: Array, values_PSD: Array, table: Array, seen: Array, scale: Any, y_CED: Array
) -> None:
    tokens, heads, width = q_CED.shape
    base = seen[0, 0] // CHUNK * CHUNK
    scores_RL = _score(q_CED.copy().reshape(tokens * heads, width), keys_PSD, table, base, seen[-1, 1])
    sums_RD = np.zeros((tokens * heads, (width + LANES - 1) // LANES * LANES), np.float32)
    totals_R = np.empty(tokens * heads)
    for row in range(tokens * heads):
        low, high = seen[row // heads, 0] - base, seen[row // heads, 1] - base
        scores_L = scores_RL[row, low:high]
        for key in range(high - low):
            scores_L[key] *= scale
        totals_R[row] = exp_and_sum(scores_L, largest(scores_L), scores_L)
    _average(scores_RL, values_PSD, table, base, seen, sums_RD)
    for row in range(tokens * heads):
        share = np.float32(1.0 / totals_R[row])
        for d in range(width):
            y_CED[row // heads, row % heads, d] = sums_RD[row, d] * share


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[::1], int64[::1], int64[::1],"
    "int32[:, ::1], float64, int64, float32[:, :, ::1])"
)
def attend(
    q_THD: Array,
    keys_PSGD: Array,
    values_PSGD: Array,
    kv_index_H: Array,
    positions_T: Array,
    sequence_ids_T: Array,
    block_tables: Array,
    scale: float,
    window: int,
    y_THD: Array,
) -> None:
    """Write the attention of each token over its own sequence, the last `window` keys of it, to y."""
    tokens, heads = q_THD.shape[:2]
    first = 0
    while first < tokens:
        sequence, last = sequence_ids_T[first], first + 1
        while last < tokens and sequence_ids_T[last] == sequence and last - first < TOKENS:
            last += 1
        seen = np.empty((last - first, 2), np.int64)
        for token in range(first, last):
            seen[token - first] = max(0, positions_T[token] + 1 - window), positions_T[token] + 1
        head = 0
        while head < heads:
            shared, end = kv_index_H[head], head + 1
            while end < heads and kv_index_H[end] == shared:
                end += 1
            q_CED, y_CED = q_THD[first:last, head:end], y_THD[first:last, head:end]
            keys, values = keys_PSGD[:, :, shared], values_PSGD[:, :, shared]
            _attend_together(q_CED, keys, values, block_tables[sequence], seen, np.float32(scale), y_CED)
            head = end
        first = last


@kernel("void(float32[:, :, ::1], float32[:, :, :, ::1], int64[::1])")
def store(new_TGD: Array, cache_PSGD: Array, slots_T: Array) -> None:
    """Copy each token's keys (or values) to its slot."""
    size = cache_PSGD.shape[1]
    for token in range(new_TGD.shape[0]):
        cache_PSGD[slots_T[token] // size, slots_T[token] % size] = new_TGD[token]
