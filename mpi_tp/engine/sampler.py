"""The next token from its logits, on rank 0.

A choice is a function of one row of logits, the seed, the sample's number and the position, and of nothing else: the
random number comes from a counter-based generator (Philox; Salmon et al., 2011), so neither the batch nor a restart
changes it. Everything is computed row by row in float64, for the same bits in any batch.
"""

import numpy as np
from numpy.typing import NDArray

from mpi_tp.engine.request import SamplingParams

MASK_64 = 2**64 - 1


def choose_token(logits: NDArray[np.float32], params: SamplingParams, sample: int, position: int) -> int:
    """Return the token that follows, from one row of logits [V]; the lowest id of several equal maxima."""
    if params.temperature == 0:
        return int(logits.argmax())
    candidates, cumulative = _candidates(logits, params)
    generator = np.random.Generator(
        np.random.Philox(key=np.array([params.seed & MASK_64, sample], np.uint64), counter=position)
    )
    index = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(candidates[min(index, len(candidates) - 1)])


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Return log softmax of one row of logits [V] at `token`, rounded to float32."""
    shifted = logits.astype(np.float64) - logits.max()
    return float(np.float32(shifted[token] - np.log(np.exp(shifted).sum())))


def _candidates(logits: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the tokens that may be chosen and their summed-up probabilities (up to a common factor)."""
    shifted = logits.astype(np.float64) - logits.max()  # first, or the division may overflow
    weights = np.exp(shifted / params.temperature)
    if params.top_k is None and params.top_p is None:
        return np.arange(len(weights)), weights.cumsum()
    order = np.argsort(-weights, kind="stable")[: params.top_k]
    cumulative = weights[order].cumsum()
    if params.top_p is not None:
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    return order, cumulative
