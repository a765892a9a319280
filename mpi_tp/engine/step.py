"""One step of the engine as rank 0 announces it: which tokens run, where they stand, whose logits are wanted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpi_tp.engine.sequence import Chunk


@dataclass(frozen=True)
class StepPlan:
    """The tokens of all sequences in the step, packed; small enough to broadcast at every step.

    `ids`, `positions`, `slots` and `sequence_ids` have one entry a token [T]; `block_tables` [B, max blocks] one row a
    sequence; `logit_rows` [R] names the tokens whose next one is to be sampled. A plan without tokens keeps the ranks
    together while rank 0 waits for input.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int64]


def plan_step(chunks: list[Chunk], block_size: int) -> StepPlan:
    """Pack the chunks, in order, into one plan."""
    lengths = np.array([chunk.stop - chunk.start for chunk in chunks], np.int64)
    tables = np.zeros((len(chunks), max((len(chunk.sequence.blocks) for chunk in chunks), default=0)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    positions = _concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    sequence_ids = np.repeat(np.arange(len(chunks)), lengths)
    blocks = tables[sequence_ids, positions // block_size].astype(np.int64)
    ends = np.cumsum(lengths) - 1
    ends_sequence = np.array([chunk.ends_sequence for chunk in chunks], bool)
    return StepPlan(
        ids=_concatenate([np.asarray(chunk.sequence.tokens[chunk.start : chunk.stop]) for chunk in chunks]),
        positions=positions,
        sequence_ids=sequence_ids,
        slots=blocks * block_size + positions % block_size,
        block_tables=tables,
        logit_rows=ends[ends_sequence],
    )


def _concatenate(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
