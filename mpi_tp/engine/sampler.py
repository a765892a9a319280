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
    candidates, cumulative = find_candidates(logits, params)
    generator = np.random.Generator(
        np.random.Philox(key=np.array([params.seed & MASK_64, sample], np.uint64), counter=position)
    )
    index = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(candidates[min(index, len(candidates) - 1)])


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Return log softmax of one row of logits [V] at `token`, rounded to float32."""
    shifted = logits.astype(np.float64) - logits.max()
    return float(np.float32(shifted[token] - np.log(np.exp(shifted).sum())))


def find_candidates(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the tokens that may be chosen and their summed-up probabilities (up to a common factor).

    `top_p` keeps the likeliest of the `top_k` tokens until their share reaches it; of equals the lower id is likelier.
    """
    shifted = logits.astype(np.float64) - logits.max()  # first, or the division may overflow
    weights = np.exp(shifted / params.temperature)
    top_k, top_p = min(params.top_k or len(weights), len(weights)), params.top_p or 1.0
    if top_k < len(weights):
        floor = np.partition(weights, -top_k)[-top_k]
    elif top_p < 1:
        floor = (1 - top_p) * weights.mean()  # tokens below it have less than 1 - top_p together
    else:
        return np.arange(len(weights)), weights.cumsum()
    # Sorting only what may be kept: a whole vocabulary would take ten times as long as all the rest.
    order = np.flatnonzero(weights >= floor)
    order = order[np.argsort(-weights[order], kind="stable")][:top_k]
    cumulative = weights[order].cumsum()
    if top_p < 1:
        total = cumulative[-1] if top_k < len(weights) else weights.sum()
        kept = int(np.searchsorted(cumulative, top_p * total)) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    return order, cumulative
