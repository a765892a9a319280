"""How the tokens of a step are dealt out to the programs of the attention kernels."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mpi_tp.kernels.base import AttentionInputs


@dataclass(frozen=True)
class TiledInputs(AttentionInputs):
    """A step's tokens, and how they share programs.

    The first `num_single` tokens are each the only one of their sequence, token i of sequence i; `longest` bounds the
    length of those sequences. `tiles` [n, 3] int32 cover the others: first token, number of tokens, row of
    `block_tables`. All tensors are there before the model's first kernel starts: kernels
    read them without waiting for the one before.
    """

    num_single: int
    tiles: torch.Tensor
    longest: int


def tile(sequence_ids: NDArray[np.integer], tokens_per_tile: int) -> tuple[int, NDArray[np.int32]]:
    """Return how many leading tokens are alone in their sequence, and tiles [n, 3] of the others.

    `sequence_ids` [T] are ascending from 0, as in `AttentionInputs`.
    """
    counts = np.bincount(sequence_ids) if len(sequence_ids) else np.zeros(0, np.int64)
    several = np.flatnonzero(counts != 1)
    num_single = int(several[0]) if len(several) else len(counts)
    tiles, first = [], num_single
    for sequence in range(num_single, len(counts)):
        for start in range(0, int(counts[sequence]), tokens_per_tile):
            tiles.append((first + start, min(tokens_per_tile, int(counts[sequence]) - start), sequence))
        first += int(counts[sequence])
    return num_single, np.array(tiles, np.int32).reshape(-1, 3)
