"""Matrix products whose every element is one chain of fused multiply-adds in the order of k.

Weights lie in tiles [N / LANES, K, LANES], padded with zero rows. Output features sit side by side in registers and
never meet, so an element has the same bits whatever the batch and whichever columns this rank holds. Sums are cut
every DEPTH terms, the parts added in order: that bounds the rounding error, and a tile's part stays in the cache
while all rows of x pass by.

T, N, K as in base.py; M = N rounded up to whole tiles. Weights are float32, or bfloat16 with an element size of 2.
"""

from typing import Any

import numpy as np

from mpi_tp.kernels.invariant_rows import ONE, ZERO, exp
from mpi_tp.kernels.jit import Address, inlined, kernel
from mpi_tp.kernels.memory import bfloats, floats, ints
from mpi_tp.kernels.product import add_product
from mpi_tp.kernels.vectors import LANES, float_of_bits, load, store

DEPTH = 256
"""Terms summed in one go."""
GROUP, GROUP_OF_ONE_ROW = 8, 4
"""Tiles that go through all of K before the next begin; even numbers. One row takes 4 side by side: 4 long streams."""

Array = np.ndarray[Any, Any]


@inlined
def _multiply_tiles(x_TK: Array, w: Array, bias_M: Array, y_TM: Array) -> None:
    """Write x · wᵀ + bias to y; a bias of no numbers is none."""
    for token in range(y_TM.shape[0]):
        for column in range(y_TM.shape[1]):
            y_TM[token, column] = bias_M[column] if bias_M.shape[0] else ZERO
    for k in range(0, w.shape[1], DEPTH):
        add_product(x_TK[:, k : k + DEPTH], w[:, k : k + DEPTH], y_TM)


@inlined
def _multiply(x_TK: Array, w: Array, bias_M: Array, y_TM: Array) -> None:
    # Rows of y may be a multiple of 4 KiB apart, and then push each other out of the processor's cache.
    sums = np.empty((x_TK.shape[0], GROUP * LANES), np.float32)
    group = GROUP_OF_ONE_ROW if x_TK.shape[0] == 1 else GROUP
    for tile in range(0, w.shape[0], group):
        end = min(tile + group, w.shape[0])
        first, last = tile * LANES, end * LANES
        _multiply_tiles(x_TK, w[tile:end], bias_M[first:last], sums[:, : last - first])
        for token in range(x_TK.shape[0]):
            for column in range(0, last - first, LANES):
                store(y_TM[token], first + column, load(sums[token], column))


@inlined
def _multiply_gated(x_TK: Array, w: Array, bias_2M: Array, y_TM: Array) -> None:
    sums = np.empty((x_TK.shape[0], GROUP * LANES), np.float32)
    group = GROUP_OF_ONE_ROW if x_TK.shape[0] == 1 else GROUP
    for tile in range(0, w.shape[0], group):
        end = min(tile + group, w.shape[0])
        first, last = tile * LANES, end * LANES
        _multiply_tiles(x_TK, w[tile:end], bias_2M[first:last], sums[:, : last - first])
        for token in range(x_TK.shape[0]):
            for column in range(0, last - first, 2 * LANES):
                gate, up = load(sums[token], column), load(sums[token], column + LANES)
                store(y_TM[token], (first + column) // 2, gate / (ONE + exp(ZERO - gate)) * up)


@kernel
def multiply(
    tokens: int, x: Address, inputs: int, tiles: int, element: int, w: Address, biased: int, bias: Address, y: Address
) -> None:
    """Write x [T, K] · wᵀ, plus a bias [M] if it is `biased`, to y [T, M]."""
    x_TK, y_TM = floats(x, (tokens, inputs)), floats(y, (tokens, tiles * LANES))
    bias_M = floats(bias, (tiles * LANES * biased,))
    if element == 2:
        _multiply(x_TK, bfloats(w, (tiles, inputs, LANES)), bias_M, y_TM)
    else:
        _multiply(x_TK, floats(w, (tiles, inputs, LANES)), bias_M, y_TM)


@kernel
def multiply_gated(
    tokens: int, x: Address, inputs: int, tiles: int, element: int, w: Address, biased: int, bias: Address, y: Address
) -> None:
    """Write silu(gate) * up to y [T, M], for x · wᵀ + bias whose tiles are gate and up in turns: 2M columns."""
    x_TK, y_TM = floats(x, (tokens, inputs)), floats(y, (tokens, tiles // 2 * LANES))
    bias_2M = floats(bias, (tiles * LANES * biased,))
    if element == 2:
        _multiply_gated(x_TK, bfloats(w, (tiles, inputs, LANES)), bias_2M, y_TM)
    else:
        _multiply_gated(x_TK, floats(w, (tiles, inputs, LANES)), bias_2M, y_TM)


@kernel
def embed(
    tokens: int, ids: Address, inputs: int, tiles: int, element: int, w: Address, start: int, size: int, y: Address
) -> None:
    """Write rows id - start of w to y [T, K], zeros where that is not one of the `size` rows."""
    ids_T, y_TK = ints(ids, (tokens,)), floats(y, (tokens, inputs))
    narrow, wide = bfloats(w, (tiles, inputs, LANES)), floats(w, (tiles, inputs, LANES))
    for token in range(tokens):
        row = ids_T[token] - start
        tile, lane = row // LANES, row % LANES
        for k in range(inputs):
            if row < 0 or row >= size:
                y_TK[token, k] = ZERO
            elif element == 2:
                y_TK[token, k] = float_of_bits(np.int32(narrow[tile, k, lane] << 16))
            else:
                y_TK[token, k] = wide[tile, k, lane]
