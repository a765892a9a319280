"""One step of the engine as rank 0 announces it: which tokens run, where they stand, whose next ones are wanted."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpi_tp.engine.sequence import Chunk, Sequence

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingRows:
    """How the next token of each row is chosen [R]."""

    temperature: NDArray[np.float32]
    """0 is greedy."""
    top_k: NDArray[np.int32]
    """0 keeps all."""
    top_p: NDArray[np.float32]
    """1 keeps all."""
    uniform: NDArray[np.float64]
    """The row's random number in [0, 1)."""
    logprobs: bool
    """Whether the log-probabilities of the chosen tokens are wanted."""


@dataclass(frozen=True)
class StepPlan:
    """The tokens of all sequences in the step, packed; small enough to broadcast at every step.

    `ids`, `positions`, `slots` and `sequence_ids` have one entry a token [T]; `block_tables` [B, max blocks] one row a
    sequence; `logit_rows` [R] names the tokens whose next one is to be sampled. An id of -1 - r is the token that row
    r of the step before has sampled. `sampling` is None if every row is greedy and no log-probabilities are wanted.
    A plan without tokens keeps the ranks together while rank 0 waits for input.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequence_ids: NDArray[np.int32]
    slots: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    sampling: SamplingRows | None = None


def plan_step(chunks: list[Chunk], block_size: int) -> StepPlan:
    """Pack the chunks, in order, into one plan, and note in their sequences which row gives them their next token."""
    sequences, *spans, ends_sequence = zip(*chunks, strict=True) if chunks else ((), (), (), ())
    starts, stops = np.array(spans, np.int32)
    lengths = stops - starts
    ends = np.cumsum(lengths, dtype=np.int32)
    ids = _ids(chunks)
    is_sampled = np.array(ends_sequence, bool)
    sampled = list(itertools.compress(sequences, ends_sequence))
    for row, sequence in enumerate(sampled):
        sequence.row = row
    positions = np.arange(len(ids), dtype=np.int32) + np.repeat(starts - (ends - lengths), lengths)
    sequence_ids = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    tables = _block_tables(sequences)
    return StepPlan(
        ids=ids,
        positions=positions,
        sequence_ids=sequence_ids,
        slots=tables[sequence_ids, positions // block_size] * block_size + positions % block_size,
        block_tables=tables,
        logit_rows=(ends - 1)[is_sampled],
        sampling=_sampling_rows(sampled),
    )


def _ids(chunks: list[Chunk]) -> NDArray[np.int32]:
    ids: list[int] = []
    for sequence, start, stop, _ in chunks:
        if start < len(sequence.tokens):
            ids += sequence.tokens[start:stop]
        else:  # on its way; such a chunk is one token long
            ids.append(-1 - sequence.row)
    return np.array(ids, np.int32)


def _block_tables(sequences: Iterable[Sequence]) -> NDArray[np.int32]:
    blocks = [sequence.blocks for sequence in sequences]
    counts = np.array([len(own) for own in blocks], np.int32)
    columns = np.arange(counts.max(initial=0), dtype=np.int32)
    tables = np.zeros((len(blocks), len(columns)), np.int32)
    if blocks:
        tables[columns < counts[:, None]] = np.concatenate(blocks)
    return tables


def _sampling_rows(sequences: list[Sequence]) -> SamplingRows | None:
    """Return how the next tokens of the sequences, which have room for them already, are chosen."""
    logprobs = any(sequence.params.logprobs for sequence in sequences)
    if not logprobs and not any(sequence.uniforms for sequence in sequences):
        return None
    params = [sequence.params for sequence in sequences]
    uniform = [own.uniforms.at(own.length - 1) if own.uniforms else 0.0 for own in sequences]
    return SamplingRows(
        temperature=np.array([min(own.temperature, LARGEST_FLOAT32) for own in params], np.float32),
        top_k=np.array([min(own.top_k or 0, LARGEST_INT32) for own in params], np.int32),
        top_p=np.array([own.top_p or 1.0 for own in params], np.float32),
        uniform=np.array(uniform, np.float64),
        logprobs=logprobs,
    )
