"""The next tokens from their logits, on the device: the choice that `sampler` defines, for all rows at once.

Every rank holds the same logits and the same random numbers; but torch promises no fixed order of a cumulative sum on a
GPU, so rank 0's choice is the one that counts.

  R = rows    V = vocabulary
"""

from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 32
"""Bounds the memory for float64 copies of the logits."""


@dataclass(frozen=True)
class SamplingTensors:
    """What `step.SamplingRows` says, on the device; each [R]. `filters` is whether any row has top_k or top_p."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    filters: bool
    logprobs: bool

    def rows(self, start: int, stop: int) -> "SamplingTensors":
        """Return some of the rows."""
        tensors = (self.temperature, self.top_k, self.top_p, self.uniform)
        temperature, top_k, top_p, uniform = (tensor[start:stop] for tensor in tensors)
        return SamplingTensors(temperature, top_k, top_p, uniform, self.filters, self.logprobs)


def sample(logits: torch.Tensor, rows: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens [R] int64 and, if wanted, their log-probabilities [R] float32.

    A token is -1 where the logits [R, V] are not finite.
    """
    spans = [(start, start + ROWS_AT_ONCE) for start in range(0, len(logits), ROWS_AT_ONCE)]
    parts = [_sample(logits[start:stop].double(), rows.rows(start, stop)) for start, stop in spans]
    tokens, logprobs = (torch.cat(group) for group in zip(*parts, strict=True))
    return tokens, logprobs if rows.logprobs else None


def _sample(logits: torch.Tensor, rows: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    top, greedy = logits.max(dim=-1)
    shifted = logits - top[:, None]
    heat = torch.where(rows.temperature > 0, rows.temperature, 1.0).double()
    weights = (shifted / heat[:, None]).exp()
    order = None
    if rows.filters:
        weights, order = _filter(weights, rows)
    cumulative = weights.cumsum(dim=-1)
    target = rows.uniform[:, None] * cumulative[:, -1:]
    # Sums that were formed in parallel need not ascend, so that the last place of all might be a token of weight zero.
    place = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, place, 0).amax(dim=-1, keepdim=True)
    index = torch.searchsorted(cumulative, target, right=True).minimum(last)
    drawn = index if order is None else order.gather(-1, index)
    tokens = torch.where(rows.temperature > 0, drawn.squeeze(-1), greedy)
    logprobs = torch.zeros_like(top)
    if rows.logprobs:
        logprobs = shifted.gather(-1, tokens[:, None]).squeeze(-1) - shifted.exp().sum(dim=-1).log()
    return torch.where(top.isfinite(), tokens, -1), logprobs.float()


def _filter(weights: torch.Tensor, rows: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [R, V] in descending order, zero where neither top_k nor top_p keeps them, and their tokens.

    Rows that keep the whole vocabulary stay in the order of tokens, in which they are drawn when they are alone.
    """
    size = torch.where(rows.top_k > 0, rows.top_k, weights.shape[1])
    filtered = (size < weights.shape[1]) | (rows.top_p < 1)
    # Of equals the lower id comes first: a row of nothing but equals stays as it is.
    order = torch.where(filtered[:, None], weights, 0.0).sort(dim=-1, descending=True, stable=True).indices
    weights = weights.gather(-1, order)
    rank = torch.arange(weights.shape[1], device=weights.device)
    weights = torch.where(rank < size[:, None], weights, 0.0)
    cumulative = weights.cumsum(dim=-1)
    enough = rows.top_p.double()[:, None] * cumulative[:, -1:]
    before = cumulative - weights
    keep = (before < enough) | (rank == 0) | (rows.top_p[:, None] >= 1)
    return torch.where(keep, weights, 0.0), order
