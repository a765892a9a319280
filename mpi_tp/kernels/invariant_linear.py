"""Matrix products whose every element is one chain of fused multiply-adds in the order of k.

Weights lie in tiles [N / LANES, K, LANES], padded with zero rows. Output features sit side by side in registers and
never meet, so an element has the same bits whatever the batch and whichever columns this rank holds. Sums are cut
every DEPTH terms, the parts added in order: that bounds the rounding error, and a tile's part stays in the cache
while all rows of x pass by.

T, N, K as in base.py. Weights are float32, or bfloat16 as uint16.
"""

from typing import Any

import numpy as np

from mpi_tp.kernels.jit import inlined, kernel
from mpi_tp.kernels.simd import LANES, product

DEPTH = 256
"""Terms summed in one go."""
GROUP = 8
"""Tiles that go through all of K before the next begin."""

Array = np.ndarray[Any, Any]


@inlined
def _multiply(x_TK: Array, w: Array, y_TN: Array) -> None:
    tiles, inputs = w.shape[:2]
    for tile in range(0, tiles, GROUP):
        end = min(tile + GROUP, tiles)
        for k in range(0, inputs, DEPTH):
            part = w[tile:end, k : k + DEPTH]
            product(0, x_TK[:, k : k + DEPTH], part, y_TN[:, tile * LANES : end * LANES])


@kernel("void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1])")
def multiply_float32(x_TK: Array, w: Array, y_TN: Array) -> None:
    """Add x · wᵀ to y."""
    _multiply(x_TK, w, y_TN)


@kernel("void(float32[:, ::1], uint16[:, :, ::1], float32[:, ::1])")
def multiply_bfloat16(x_TK: Array, w: Array, y_TN: Array) -> None:
    """Add x · wᵀ to y."""
    _multiply(x_TK, w, y_TN)
