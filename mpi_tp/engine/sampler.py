"""The next token from its logits, on the host.

A choice is a function of one row of logits, how it is to be sampled and its random number. Everything is computed row
by row in float64, for the same bits in any batch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpi_tp.engine.step import SamplingRows


@dataclass(frozen=True)
class Sampled:
    """The next token of each row [R], -1 where the logits are not finite numbers, and its log-probability [R]."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None


def sample(logits: NDArray[np.float32], rows: SamplingRows) -> Sampled:
    """Choose a token for each row of logits [R, V]."""
    tokens = np.full(len(logits), -1, np.int64)
    logprobs = np.zeros(len(logits), np.float32)
    for row, (own, *options) in enumerate(
        zip(logits, rows.temperature.tolist(), rows.top_k.tolist(), rows.top_p.tolist(), rows.uniform, strict=True)
    ):
        if np.isfinite(own.max()):
            tokens[row] = choose_token(own, *options)
            if rows.logprobs:
                logprobs[row] = log_probability(own, tokens[row])
    return Sampled(tokens, logprobs if rows.logprobs else None)


def choose_token(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """Return the token that follows, from one row of logits [V]; if greedy the lowest id of several equal maxima."""
    if temperature == 0:
        return int(logits.argmax())
    candidates, cumulative = find_candidates(logits, temperature, top_k, top_p)
    index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(candidates[min(index, len(candidates) - 1)])


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Return log softmax of one row of logits [V] at `token`, rounded to float32."""
    shifted = logits.astype(np.float64) - logits.max()
    return float(np.float32(shifted[token] - np.log(np.exp(shifted).sum())))


def find_candidates(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the tokens that may be chosen and their summed-up probabilities (up to a common factor).

    `top_p` keeps the likeliest of the `top_k` (0: all) tokens until their share reaches it; of equals the lower id is
    likelier.
    """
    shifted = logits.astype(np.float64) - logits.max()  # first, or the division may overflow
    weights = np.exp(shifted / temperature)
    top_k = min(top_k or len(weights), len(weights))
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
