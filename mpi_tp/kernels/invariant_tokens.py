"""The likeliest token of each row of logits."""

import math
from typing import Any

import numpy as np

from mpi_tp.kernels.jit import Address, inlined, kernel
from mpi_tp.kernels.memory import floats, ints
from mpi_tp.kernels.vectors import LANES, fill, lane, load, maximum

Array = np.ndarray[Any, Any]

LOWEST = np.float32(-np.inf)
SPAN = 1024
"""Columns looked at in one go; only in those that hold the largest number is its place looked for."""


@inlined
def _largest(x_N: Array) -> Any:
    """Return the largest number; NaN, if there is one, is larger than all."""
    whole = x_N.shape[0] - x_N.shape[0] % LANES
    tops = fill(LOWEST)
    for n in range(0, whole, LANES):
        tops = maximum(tops, load(x_N, n))
    top = LOWEST
    for number in range(LANES):
        top = maximum(top, lane(tops, number))
    for n in range(whole, x_N.shape[0]):
        top = maximum(top, x_N[n])
    return top


@inlined
def _first_span(x_N: Array) -> int:
    """Return where the first SPAN columns with the row's largest number begin."""
    top, first = LOWEST, 0
    for start in range(0, x_N.shape[0], SPAN):
        high = _largest(x_N[start : start + SPAN])
        if high > top or math.isnan(high):
            top, first = high, start
        if math.isnan(high):
            break
    return first


@kernel
def best_token(rows: int, columns: int, start: int, logits: Address, best: Address) -> None:
    """Write each row's largest logit [R, N] and its column + start to best [R, 2]."""
    logits_RN, best_R2 = floats(logits, (rows, columns)), floats(best, (rows, 2))
    for row in range(rows):
        x_N = logits_RN[row]
        column = _first_span(x_N)
        top = _largest(x_N[column : column + SPAN])
        while column < columns and x_N[column] != top and not math.isnan(x_N[column]):
            column += 1
        best_R2[row, 0], best_R2[row, 1] = top, start + column


@kernel
def choose_token(rows: int, ranks: int, best: Address, tokens: Address) -> None:
    """Write the token of the best pair [R, ranks, 2] to tokens [R], -1 if its logit is not finite."""
    best_RX2, tokens_R = floats(best, (rows, ranks, 2)), ints(tokens, (rows,))
    for row in range(rows):
        top, owner = best_RX2[row, 0, 0], 0
        for rank in range(1, ranks):
            value = best_RX2[row, rank, 0]
            if value > top or math.isnan(value):
                top, owner = value, rank
        tokens_R[row] = np.int64(best_RX2[row, owner, 1]) if math.isfinite(top) else -1
