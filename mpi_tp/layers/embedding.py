"""The vocabulary, split over the ranks by rows.

ids [T]    hidden [T, K]    logits [R, V]    V vocabulary, weight [V/ranks, K]
"""

import torch

from mpi_tp.layers.context import LayerContext


class VocabParallelEmbedding:
    """Token ids to hidden states: the rank that owns a token's row provides it, the others add zeros."""

    def __init__(self, context: LayerContext, name: str) -> None:
        planned = context.plan[f"{name}.weight"]
        self._comm = context.comm
        self._kernels = context.kernels
        self.start = sum(planned.sizes[: context.comm.rank])
        self.sizes = planned.sizes
        self.weight = context.kernels.prepare(context.take(f"{name}.weight"))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, K] of ids [T]."""
        rows = self._kernels.embedding(ids, self.weight, self.start)
        # Adding zero here makes a stored -0.0 the same +0.0 that a sum with another rank's zeros gives.
        return self._comm.all_reduce(rows).add_(0.0)


class ParallelLMHead:
    """Hidden states to logits, each rank its own part of the vocabulary, then gathered."""

    def __init__(self, context: LayerContext, embedding: VocabParallelEmbedding, name: str) -> None:
        """Take the weight `name`; where the plan has none, the model is tied and the embedding's serves."""
        weight = context.take_if_planned(f"{name}.weight")
        self._comm = context.comm
        self._kernels = context.kernels
        self._sizes = embedding.sizes
        self._start = embedding.start
        self._weight = embedding.weight if weight is None else context.kernels.prepare(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of hidden states [R, K], the same on every rank."""
        return self._comm.all_gather(self._kernels.linear(hidden, self._weight), self._sizes)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token [R] int64 of hidden states [R, K], on every rank; -1 where logits are not finite.

        Only each rank's best is gathered. Of equal logits the lowest token wins, as in an argmax over all of them.
        """
        best = self._kernels.best_token(self._kernels.linear(hidden, self._weight), self._start)
        by_rank = self._comm.all_gather(best, [2] * self._comm.size)
        return self._kernels.choose_token(by_rank.unflatten(-1, (-1, 2)))
