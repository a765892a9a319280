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
from mpi_tp.kernels.simd import LANES, tile_product

DEPTH = 256

Array = np.ndarray[Any, Any]


@inlined
def _multiply(x_TK: Array, w: Array, y_TN: Array) -> None:
    tiles, inputs = w.shape[:2]
    # Few rows wait for weights from memory: reading several tiles at once keeps it busy.
    group = 4 if x_TK.shape[0] == 1 else 2 if x_TK.shape[0] <= 3 else 1
    for tile in range(0, tiles, group):
        for k in range(0, inputs, DEPTH):
            x, part, y = x_TK[:, k : k + DEPTH], w[tile:, k : k + DEPTH], y_TN[:, tile * LANES :]
            if group == 4 and tiles - tile >= 4:
                tile_product(4, 0, x, part, y)
            elif group == 2 and tiles - tile >= 2:
                tile_product(2, 0, x, part, y)
            else:
                for rest in range(min(group, tiles - tile)):
                    tile_product(1, 0, x, part[rest:], y[:, rest * LANES :])


@kernel("void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1])")
def multiply_float32(x_TK: Array, w: Array, y_TN: Array) -> None:
    """Add x · wᵀ to y."""
    _multiply(x_TK, w, y_TN)


@kernel("void(float32[:, ::1], uint16[:, :, ::1], float32[:, ::1])")
def multiply_bfloat16(x_TK: Array, w: Array, y_TN: Array) -> None:
    """Add x · wᵀ to y."""
    _multiply(x_TK, w, y_TN)
