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

from mpi_tp.kernels.invariant_rows import ZERO, exp, normalise, total
from mpi_tp.kernels.jit import Address, inlined, kernel
from mpi_tp.kernels.memory import floats, ints, short_ints
from mpi_tp.kernels.product import carry_product
from mpi_tp.kernels.vectors import LANES, fill, fma, lane, larger, load, store, widen

Array = np.ndarray[Any, Any]

HIDDEN = np.float32(-np.inf)
"""The score of a key that the token does not see."""
FETCHED_AHEAD = 2
"""How many blocks before its use a block is fetched into the processor's cache."""


@inlined
def _softmax(scores_L: Array, scale: Any) -> Any:
    """Turn scores [L], L a multiple of LANES, into weights and return what these are to be multiplied by."""
    tops = fill(HIDDEN)
    for key in range(0, scores_L.shape[0], LANES):
        scaled = load(scores_L, key) * scale
        store(scores_L, key, scaled)
        tops = larger(tops, scaled)
    top = HIDDEN
    for number in range(LANES):
        top = larger(top, lane(tops, number))
    sums = fill(0.0)
    for key in range(0, scores_L.shape[0], LANES):
        weights = exp(load(scores_L, key) - top)
        store(scores_L, key, weights)
        sums = sums + widen(weights)
    return np.float32(1.0 / total(sums))


@inlined
def _score(q_ED: Array, keys_PDS: Array, table_M: Array, start: int, end: int, scores_EL: Array) -> None:
    """Write the products of queries and keys, whole blocks from `start`, where a block begins, past end - 1."""
    size = keys_PDS.shape[2]
    first, last = start // size, (end - 1) // size
    for row in range(q_ED.shape[0]):
        for key in range((last + 1) * size - start):
            scores_EL[row, key] = ZERO
    for block in range(first, last + 1):
        ahead = keys_PDS[table_M[min(block + FETCHED_AHEAD, last)]]
        place = block * size - start
        carry_product(q_ED, keys_PDS[table_M[block]], scores_EL[:, place : place + size], ahead)


@inlined
def _average(
    weights_EL: Array, values_PSD: Array, table_M: Array, start: int, first: int, end: int, y_ED: Array
) -> None:
    """Write the sum of values first … end - 1 by weight to y; weights begin at `start`."""
    size = values_PSD.shape[1]
    last = (end - 1) // size
    for row in range(y_ED.shape[0]):
        for d in range(y_ED.shape[1]):
            y_ED[row, d] = ZERO
    for block in range(first // size, last + 1):
        low, high = max(first, block * size), min(end, (block + 1) * size)
        values = values_PSD[table_M[block], low - block * size : high - block * size]
        ahead = values_PSD[table_M[min(block + FETCHED_AHEAD, last)]]
        carry_product(weights_EL[:, low - start : high - start], values, y_ED, ahead)


@inlined
def _attend_heads(
    q_TED: Array,
    keys_PDS: Array,
    values_PSD: Array,
    positions_T: Array,
    sequences_T: Array,
    tables_BM: Array,
    scale: Any,
    window: int,
    y_TED: Array,
) -> None:
    """Write the attention of heads that share keys and values.

    Tokens of one sequence follow one another and find the keys of this head in the processor's cache.
    """
    tokens, heads = q_TED.shape[:2]
    size = values_PSD.shape[1]
    scores_EL, shares_E = np.empty((heads, tables_BM.shape[1] * size), np.float32), np.empty(heads, np.float32)
    for token in range(tokens):
        end = positions_T[token] + 1
        first = max(0, end - window)
        start, padded = first // size * size, (end + size - 1) // size * size
        table_M = tables_BM[sequences_T[token]]
        _score(q_TED[token], keys_PDS, table_M, start, end, scores_EL)
        for row in range(heads):
            # What lies in the cache beyond the sequence may be anything.
            for key in range(start, first):
                scores_EL[row, key - start] = HIDDEN
            for key in range(end, padded):
                scores_EL[row, key - start] = HIDDEN
            shares_E[row] = _softmax(scores_EL[row, : padded - start], scale)
        y_ED = y_TED[token]
        _average(scores_EL, values_PSD, table_M, start, first, end, y_ED)
        for row in range(heads):
            for d in range(y_ED.shape[1]):
                y_ED[row, d] *= shares_E[row]


@inlined
def _attend_any(
    q_ED: Array, keys_PDS: Array, values_PSD: Array, table_M: Array, first: int, end: int, scale: Any, y_ED: Array
) -> None:
    """Write the attention of one token's heads that share keys and values, number by number."""
    size = values_PSD.shape[1]
    weights_L = np.empty((end - first + LANES - 1) // LANES * LANES, np.float32)
    for row in range(q_ED.shape[0]):
        for key in range(weights_L.shape[0]):
            weights_L[key] = HIDDEN
        for key in range(first, end):
            score = ZERO
            for d in range(q_ED.shape[1]):
                score = fma(q_ED[row, d], keys_PDS[table_M[key // size], d, key % size], score)
            weights_L[key - first] = score
        share = _softmax(weights_L, scale)
        for d in range(q_ED.shape[1]):
            y = ZERO
            for key in range(first, end):
                y = fma(weights_L[key - first], values_PSD[table_M[key // size], key % size, d], y)
            y_ED[row, d] = y * share


@kernel
def attend(
    tokens: int,
    heads: int,
    width: int,
    num_blocks: int,
    kv_heads: int,
    size: int,
    q: Address,
    keys: Address,
    values: Address,
    head_starts: Address,
    num_sequences: int,
    max_blocks: int,
    positions: Address,
    sequence_ids: Address,
    block_tables: Address,
    scale: float,
    window: int,
    y: Address,
) -> None:
    """Write the attention [T, H, D] of each token over its own sequence, the last `window` keys of it, to y."""
    q_THD, y_THD = floats(q, (tokens, heads, width)), floats(y, (tokens, heads, width))
    keys_PGDS = floats(keys, (num_blocks, kv_heads, width, size))
    values_PGSD = floats(values, (num_blocks, kv_heads, size, width))
    starts, tables_BM = short_ints(head_starts, (kv_heads + 1,)), short_ints(block_tables, (num_sequences, max_blocks))
    positions_T, sequences_T = ints(positions, (tokens,)), ints(sequence_ids, (tokens,))
    narrow_scale = np.float32(scale)
    for shared in range(kv_heads):
        own = slice(starts[shared], starts[shared + 1])
        q_TED, y_TED, keys_PDS, values_PSD = q_THD[:, own], y_THD[:, own], keys_PGDS[:, shared], values_PGSD[:, shared]
        if size % LANES == 0 and width % LANES == 0:
            _attend_heads(q_TED, keys_PDS, values_PSD, positions_T, sequences_T, tables_BM, narrow_scale, window, y_TED)
        else:
            for token in range(tokens):
                end = positions_T[token] + 1
                table_M = tables_BM[sequences_T[token]]
                first = max(0, end - window)
                _attend_any(q_TED[token], keys_PDS, values_PSD, table_M, first, end, narrow_scale, y_TED[token])


@inlined
def _rotate(x_D: Array, cos_D: Array, sin_D: Array, y_D: Array) -> None:
    """Write a head rotated by position, halves together, to y."""
    half = x_D.shape[0] // 2
    for d in range(half):
        first, second = x_D[d], x_D[d + half]
        y_D[d] = first * cos_D[d] - second * sin_D[d]
        y_D[d + half] = second * cos_D[d + half] + first * sin_D[d + half]


@kernel
def rotate_and_store(
    tokens: int,
    heads: int,
    width: int,
    num_blocks: int,
    kv_heads: int,
    size: int,
    qkv: Address,
    normed: int,
    q_norm: Address,
    k_norm: Address,
    eps: float,
    cos: Address,
    sin: Address,
    slots: Address,
    q: Address,
    keys: Address,
    values: Address,
) -> None:
    """Write queries, rotated, to q [T, H, D], and keys, rotated, and values to their slots.

    Query and key heads go through their norms first if they are `normed`.
    """
    qkv_THD, q_THD = floats(qkv, (tokens, heads + 2 * kv_heads, width)), floats(q, (tokens, heads, width))
    keys_PGDS = floats(keys, (num_blocks, kv_heads, width, size))
    values_PGSD = floats(values, (num_blocks, kv_heads, size, width))
    q_norm_D, k_norm_D, slots_T = floats(q_norm, (width,)), floats(k_norm, (width,)), ints(slots, (tokens,))
    cos_TD, sin_TD = floats(cos, (tokens, width)), floats(sin, (tokens, width))
    normed_D, rotated_D = np.empty(width, np.float32), np.empty(width, np.float32)
    for token in range(tokens):
        block, place = slots_T[token] // size, slots_T[token] % size
        for head in range(heads + kv_heads):
            x_D = qkv_THD[token, head]
            if normed:
                normalise(x_D, q_norm_D if head < heads else k_norm_D, eps, normed_D)
                x_D = normed_D
            if head < heads:
                _rotate(x_D, cos_TD[token], sin_TD[token], q_THD[token, head])
            else:
                _rotate(x_D, cos_TD[token], sin_TD[token], rotated_D)
                for d in range(width):
                    keys_PGDS[block, head - heads, d, place] = rotated_D[d]
        for head in range(kv_heads):
            for d in range(width):
                values_PGSD[block, head, place, d] = qkv_THD[token, heads + kv_heads + head, d]
