"""Operations on one row or one element, in loops of our own.

Vector libraries compute the last elements of a row by other code than the rest, so that exp(x) depends on where x
stands. Here every step is an IEEE operation or a fused multiply-add, whose bits a vector register does not change.
"""

import math
from typing import Any

import numpy as np

from mpi_tp.kernels.jit import Address, inlined, kernel
from mpi_tp.kernels.memory import floats
from mpi_tp.kernels.vectors import LANES, fill, fma, lane, larger, load, smaller, times_power, widen

Array = np.ndarray[Any, Any]

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(-0.693359375)
LN2_LOW = np.float32(2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)
"""Adding it rounds a float32 to an integer, which then stands in the low bits."""
EXP_SERIES = tuple(
    np.float32(c) for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
EXP_SERIES_TOP = np.float32(1.9875691500e-4)
EXP_LOWEST, EXP_HIGHEST = np.float32(-104), np.float32(89)
ZERO, ONE = np.float32(0), np.float32(1)


@inlined
def exp(x: Any) -> Any:
    """Return e^x in float32, within 1.1 units in the last place (the polynomial of Cephes' expf)."""
    x = smaller(larger(x, EXP_LOWEST), EXP_HIGHEST)
    shifted = fma(x, LOG2_E, ROUNDER)
    power = shifted - ROUNDER
    rest = fma(power, LN2_LOW, fma(power, LN2_HIGH, x))
    series = fma(rest, EXP_SERIES_TOP, EXP_SERIES[0])
    series = fma(series, rest, EXP_SERIES[1])
    series = fma(series, rest, EXP_SERIES[2])
    series = fma(series, rest, EXP_SERIES[3])
    series = fma(series, rest, EXP_SERIES[4])
    return times_power(fma(series, rest * rest, rest) + ONE, shifted)


@inlined
def total(sums: Any) -> Any:
    """Return the sum of a vector's numbers, in order."""
    result = lane(sums, 0)
    for number in range(1, LANES):
        result += lane(sums, number)
    return result


@inlined
def normalise(x_K: Array, weight_K: Array, eps: float, y_K: Array) -> None:
    """Write x over its root mean square, times weight, to y; squares are summed in float64, LANES sums side by side."""
    size = x_K.shape[0]
    whole = size - size % LANES
    sums = fill(0.0)
    for k in range(0, whole, LANES):
        part = widen(load(x_K, k))
        sums = fma(part, part, sums)
    squares = total(sums)
    for k in range(whole, size):
        squares += np.float64(x_K[k]) * np.float64(x_K[k])
    scale = np.float32(1.0 / math.sqrt(squares / size + eps))
    for k in range(size):
        y_K[k] = weight_K[k] * (x_K[k] * scale)


@kernel
def rms_norm(tokens: int, width: int, x: Address, weight: Address, eps: float, y: Address) -> None:
    """Write the rows of x [T, K], normalised, to y."""
    x_TK, weight_K, y_TK = floats(x, (tokens, width)), floats(weight, (width,)), floats(y, (tokens, width))
    for token in range(tokens):
        normalise(x_TK[token], weight_K, eps, y_TK[token])


@kernel
def add_rms_norm(tokens: int, width: int, x: Address, delta: Address, weight: Address, eps: float, y: Address) -> None:
    """Add delta to x [T, K] and write the rows of the sum, normalised, to y."""
    x_TK, delta_TK, y_TK = (floats(x, (tokens, width)), floats(delta, (tokens, width)), floats(y, (tokens, width)))
    weight_K = floats(weight, (width,))
    for token in range(tokens):
        for k in range(width):
            x_TK[token, k] += delta_TK[token, k]
        normalise(x_TK[token], weight_K, eps, y_TK[token])


@kernel
def silu(size: int, x: Address, y: Address) -> None:
    """Write x / (1 + exp(-x)) to y."""
    numbers, results = floats(x, (size,)), floats(y, (size,))
    for i in range(size):
        results[i] = numbers[i] / (ONE + exp(ZERO - numbers[i]))


@kernel
def gelu(size: int, x: Address, y: Address) -> None:
    """Write x times the normal distribution function of x to y."""
    numbers, results = floats(x, (size,)), floats(y, (size,))
    for i in range(size):
        results[i] = 0.5 * numbers[i] * (1.0 + math.erf(numbers[i] * math.sqrt(0.5)))


@kernel
def tanh(size: int, x: Address, y: Address) -> None:
    """Write the hyperbolic tangent of x to y."""
    numbers, results = floats(x, (size,)), floats(y, (size,))
    for i in range(size):
        results[i] = math.tanh(np.float64(numbers[i]))
