"""Causal attention over the paged cache: each token's sums run over its own keys, in order.

A score is a sum over the head dimension, an output a sum over exactly the keys that the token sees, both in order; so
neither the tokens around it nor the place of its blocks can change a bit.

In a block of this cache, values lie as [G, S, D] and keys as [G, D, S]: keys side by side fill a register, as
parts of a value do. `attend` reads both where they are and wants S and D in multiples of LANES; `attend_any` takes
any shape, slowly.

Shape suffix legend
  T, H, G, D, P, S as in base.py    B = sequences    M = blocks a sequence at most
  E = query heads that share a key/value head    L = keys in sight, from the start of a block
"""

from typing import Any

import numpy as np

from mpi_tp.kernels.invariant_rows import exp_and_sum, largest, normalise
from mpi_tp.kernels.jit import inlined, kernel
from mpi_tp.kernels.simd import fetch, fma, product

Array = np.ndarray[Any, Any]

ZERO = np.float32(0)


@inlined
def _softmax(scores_L: Array, scale: Any) -> None:
    """Turn scores into weights."""
    for key in range(scores_L.shape[0]):
        scores_L[key] *= scale
    share = np.float32(1.0 / exp_and_sum(scores_L, largest(scores_L), scores_L))
    for key in range(scores_L.shape[0]):
        scores_L[key] *= share


@inlined
def _score(q_ED: Array, keys_PDS: Array, table_M: Array, start: int, end: int, scores_EL: Array) -> None:
    """Write the products of queries and keys, whole blocks from `start`, where a block begins, past end - 1."""
    size = keys_PDS.shape[2]
    for row in range(q_ED.shape[0]):
        for key in range(scores_EL.shape[1]):
            scores_EL[row, key] = 0
    for key in range(start, end, size):
        if key + size < end:
            fetch(keys_PDS[table_M[key // size + 1]])
        product(1, q_ED, keys_PDS[table_M[key // size]], scores_EL[:, key - start : key - start + size])


@inlined
def _average(
    weights_EL: Array, values_PSD: Array, table_M: Array, start: int, first: int, end: int, y_ED: Array
) -> None:
    """Add values first … end - 1 by weight to y; weights begin at `start`."""
    size = values_PSD.shape[1]
    blocks = (end + size - 1) // size
    for block in range(first // size, blocks):
        if block + 1 < blocks:
            fetch(values_PSD[table_M[block + 1]])
        low, high = max(first, block * size), min(end, (block + 1) * size)
        values = values_PSD[table_M[block], low - block * size : high - block * size]
        product(1, weights_EL[:, low - start : high - start], values, y_ED)


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[::1], int64[::1], int64[::1],"
    "int32[:, ::1], float32, int64, float32[:, :, ::1])"
)
def attend(
    q_THD: Array,
    keys_PGDS: Array,
    values_PGSD: Array,
    kv_index_H: Array,
    positions_T: Array,
    sequences_T: Array,
    tables_BM: Array,
    scale: Any,
    window: int,
    y_THD: Array,
) -> None:
    """Add the attention of each token over its own sequence, the last `window` keys of it, to y, zero on entry."""
    heads, size = q_THD.shape[1], values_PGSD.shape[2]
    last = 0
    while last < heads:
        head, shared = last, kv_index_H[last]
        while last < heads and kv_index_H[last] == shared:
            last += 1
        keys_PDS, values_PSD = keys_PGDS[:, shared], values_PGSD[:, shared]
        scores_EL = np.empty((last - head, tables_BM.shape[1] * size), np.float32)
        # Tokens of one sequence follow one another and find the keys of this head in the processor's cache.
        for token in range(q_THD.shape[0]):
            end = positions_T[token] + 1
            first = max(0, end - window)
            start = first // size * size
            table_M, y_ED = tables_BM[sequences_T[token]], y_THD[token, head:last]
            _score(q_THD[token, head:last], keys_PDS, table_M, start, end, scores_EL)
            for row in range(last - head):
                _softmax(scores_EL[row, first - start : end - start], scale)
            _average(scores_EL, values_PSD, table_M, start, first, end, y_ED)


@kernel(
    "void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1], int64[::1], int64[::1], int64[::1],"
    "int32[:, ::1], float32, int64, float32[:, :, ::1])"
)
def attend_any(
    q_THD: Array,
    keys_PGDS: Array,
    values_PGSD: Array,
    kv_index_H: Array,
    positions_T: Array,
    sequences_T: Array,
    tables_BM: Array,
    scale: Any,
    window: int,
    y_THD: Array,
) -> None:
    """Do what `attend` does for any S and D."""
    tokens, heads, width = q_THD.shape
    size = values_PGSD.shape[2]
    for token in range(tokens):
        first, end = max(0, positions_T[token] + 1 - window), positions_T[token] + 1
        table_M = tables_BM[sequences_T[token]]
        weights_L = np.empty(end - first, np.float32)
        for head in range(heads):
            shared = kv_index_H[head]
            for key in range(first, end):
                score = ZERO
                for d in range(width):
                    score = fma(q_THD[token, head, d], keys_PGDS[table_M[key // size], shared, d, key % size], score)
                weights_L[key - first] = score
            _softmax(weights_L, scale)
            for key in range(first, end):
                weight = weights_L[key - first]
                for d in range(width):
                    value = values_PGSD[table_M[key // size], shared, key % size, d]
                    y_THD[token, head, d] = fma(weight, value, y_THD[token, head, d])


@inlined
def _rotate(x_D: Array, cos_D: Array, sin_D: Array, y_D: Array) -> None:
    """Write a head rotated by position, halves together, to y."""
    half = x_D.shape[0] // 2
    for d in range(half):
        first, second = x_D[d], x_D[d + half]
        y_D[d] = first * cos_D[d] - second * sin_D[d]
        y_D[d + half] = second * cos_D[d + half] + first * sin_D[d + half]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[::1], float64, float32[:, ::1], float32[:, ::1], int64[::1],"
    "float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, :, ::1])"
)
def rotate_and_store(
    qkv_TW: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    cos_TD: Array,
    sin_TD: Array,
    slots_T: Array,
    q_THD: Array,
    keys_PGDS: Array,
    values_PGSD: Array,
) -> None:
    """Write queries, rotated, to q, and keys, rotated, and values to their slots.

    Norms of no numbers leave the heads as they are.
    """
    tokens, heads, width = q_THD.shape
    kv_heads, size = values_PGSD.shape[1], values_PGSD.shape[2]
    normed, rotated = np.empty(width, np.float32), np.empty(width, np.float32)
    for token in range(tokens):
        block, place = slots_T[token] // size, slots_T[token] % size
        for head in range(heads + kv_heads):
            x_D = qkv_TW[token, head * width : (head + 1) * width]
            weight = q_norm if head < heads else k_norm
            if weight.shape[0]:
                normalise(x_D, weight, eps, normed)
                x_D = normed
            if head < heads:
                _rotate(x_D, cos_TD[token], sin_TD[token], q_THD[token, head])
            else:
                _rotate(x_D, cos_TD[token], sin_TD[token], rotated)
                for d in range(width):
                    keys_PGDS[block, head - heads, d, place] = rotated[d]
        for head in range(kv_heads):
            start = (heads + kv_heads + head) * width
            for d in range(width):
                values_PGSD[block, head, place, d] = qkv_TW[token, start + d]
