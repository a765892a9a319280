"""Operations on one row or one element, in loops of our own.

Vector libraries compute the last elements of a row by other code than the rest, so that exp(x) depends on where x
stands. Here every step is an IEEE operation or a fused multiply-add, whose bits a vector register does not change.
"""

import math
from typing import Any

import numpy as np

from mpi_tp.kernels.jit import inlined, kernel
from mpi_tp.kernels.simd import LANES, bits_of_float, float_of_bits, fma

Array = np.ndarray[Any, Any]

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(-0.693359375)
LN2_LOW = np.float32(2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)
"""Adding it rounds a float32 to an integer, which then stands in the low bits."""
ROUNDER_BITS = 0x4B400000
EXP_SERIES = tuple(
    np.float32(c) for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
EXP_SERIES_TOP = np.float32(1.9875691500e-4)
EXP_LOWEST, EXP_HIGHEST = np.float32(-104), np.float32(89)
ONE = np.float32(1)


@inlined
def exp(x: Any) -> Any:
    """Return e^x in float32, within 1.1 units in the last place (the polynomial of Cephes' expf)."""
    x = EXP_LOWEST if x < EXP_LOWEST else x
    x = EXP_HIGHEST if x > EXP_HIGHEST else x
    shifted = fma(x, LOG2_E, ROUNDER)
    power = shifted - ROUNDER
    rest = fma(power, LN2_LOW, fma(power, LN2_HIGH, x))
    series = EXP_SERIES_TOP
    for coefficient in EXP_SERIES:
        series = fma(series, rest, coefficient)
    mantissa = fma(series, rest * rest, rest) + ONE
    # The power of two goes in by halves: as a whole it leaves the range of float32 where the result is still inside.
    exponent = bits_of_float(shifted) - ROUNDER_BITS
    half = exponent >> 1
    scale = float_of_bits(np.int32((half + 127) << 23))
    return mantissa * scale * float_of_bits(np.int32((exponent - half + 127) << 23))


@inlined
def exp_and_sum(x_K: Array, shift: Any, y_K: Array) -> Any:
    """Write exp(x - shift) to y and return its sum in float64: LANES interleaved sums, then those in order."""
    for k in range(x_K.shape[0]):
        y_K[k] = exp(x_K[k] - shift)
    sums = np.empty(LANES)
    for lane in range(LANES):
        sums[lane] = 0.0
    whole = x_K.shape[0] - x_K.shape[0] % LANES
    for k in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += y_K[k + lane]
    for k in range(whole, x_K.shape[0]):
        sums[k - whole] += y_K[k]
    total = 0.0
    for lane in range(LANES):
        total += sums[lane]
    return total


@inlined
def largest(x_K: Array) -> Any:
    """Return the largest number; one that is no number (NaN) is passed over."""
    tops = np.empty(LANES, np.float32)
    for lane in range(LANES):
        tops[lane] = -np.inf
    whole = x_K.shape[0] - x_K.shape[0] % LANES
    for k in range(0, whole, LANES):
        for lane in range(LANES):
            tops[lane] = x_K[k + lane] if x_K[k + lane] > tops[lane] else tops[lane]
    for k in range(whole, x_K.shape[0]):
        tops[0] = x_K[k] if x_K[k] > tops[0] else tops[0]
    top = tops[0]
    for lane in range(1, LANES):
        top = tops[lane] if tops[lane] > top else top
    return top


@inlined
def normalise(x_K: Array, weight_K: Array, eps: float, y_K: Array) -> None:
    """Write x over its root mean square, times weight, to y."""
    squares = 0.0
    for k in range(x_K.shape[0]):
        squares += np.float64(x_K[k]) * np.float64(x_K[k])
    scale = np.float32(1.0 / math.sqrt(squares / x_K.shape[0] + eps))
    for k in range(x_K.shape[0]):
        y_K[k] = weight_K[k] * (x_K[k] * scale)


@kernel("void(float32[:, ::1], float32[::1], float64, float32[:, ::1])")
def rms_norm(x_TK: Array, weight_K: Array, eps: float, y_TK: Array) -> None:
    """Write the rows of x, normalised, to y."""
    for token in range(x_TK.shape[0]):
        normalise(x_TK[token], weight_K, eps, y_TK[token])


@kernel("void(float32[:, ::1], float32[:, ::1], float32[::1], float64, float32[:, ::1])")
def add_rms_norm(x_TK: Array, delta_TK: Array, weight_K: Array, eps: float, y_TK: Array) -> None:
    """Add delta to x and write the rows of the sum, normalised, to y."""
    for token in range(x_TK.shape[0]):
        for k in range(x_TK.shape[1]):
            x_TK[token, k] += delta_TK[token, k]
        normalise(x_TK[token], weight_K, eps, y_TK[token])


@kernel("void(float32[:, ::1], float32[:, ::1])")
def gate(x_TM: Array, y_TN: Array) -> None:
    """Write silu of the first N columns of x times the next N to y."""
    size = y_TN.shape[1]
    for token in range(y_TN.shape[0]):
        for n in range(size):
            x = x_TM[token, n]
            y_TN[token, n] = x / (ONE + exp(-x)) * x_TM[token, size + n]


@kernel("void(float32[::1], float32[::1])")
def silu(x: Array, y: Array) -> None:
    """Write x / (1 + exp(-x)) to y."""
    for i in range(x.shape[0]):
        y[i] = x[i] / (ONE + exp(-x[i]))


@kernel("void(float32[::1], float32[::1])")
def gelu(x: Array, y: Array) -> None:
    """Write x times the normal distribution function of x to y."""
    for i in range(x.shape[0]):
        y[i] = 0.5 * x[i] * (1.0 + math.erf(x[i] * math.sqrt(0.5)))


@kernel("void(float32[::1], float32[::1])")
def tanh(x: Array, y: Array) -> None:
    """Write the hyperbolic tangent of x to y."""
    for i in range(x.shape[0]):
        y[i] = math.tanh(np.float64(x[i]))
