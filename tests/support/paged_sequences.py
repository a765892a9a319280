"""Sequences that attention runs through in any schedule, on any device."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpi_tp.kernels.base import AttentionHeads, Cache
from mpi_tp.kernels.gpu.attention import tokens_per_tile
from mpi_tp.kernels.gpu.tiles import TiledInputs, tile
from tests.support.gpu_checks import uneven_heads
from tests.unit.test_kernels import plain_attention, random

BLOCK_SIZE = 16
SPARE = 3
"""Blocks of the cache that no sequence has."""

Step = list[tuple[int, int, int]]
"""Sequence, first token, end."""
Attend = Callable[[torch.Tensor, Cache, AttentionHeads, TiledInputs, int | None], torch.Tensor]


class PagedSequences:
    """Queries [n, H, D], keys and values [n, G, D] of sequences of n tokens.

    `groups[g]` heads share key/value head g.
    """

    def __init__(
        self, lengths: Sequence[int], groups: tuple[int, ...], width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths, self.device = lengths, device
        self.heads = uneven_heads(groups, width, device)
        self.q = [random(n, n, sum(groups), width).to(device, dtype) for n in lengths]
        self.k, self.v = ([random(n + at, n, len(groups), width).to(device, dtype) for n in lengths] for at in (1, 2))

    def some_heads(self, start: int, stop: int) -> "PagedSequences":
        """Return the same sequences with query heads start … stop - 1 alone, and the key/value heads they need."""
        kv_index = self.heads.kv_index[start:stop]
        first, last = int(kv_index[0]), int(kv_index[-1]) + 1
        part = PagedSequences([], (1,), self.heads.head_dim, self.device, self.q[0].dtype)
        part.lengths, part.q = self.lengths, [q[:, start:stop] for q in self.q]
        part.k, part.v = ([whole[:, first:last] for whole in both] for both in (self.k, self.v))
        part.heads = AttentionHeads(kv_index - first, last - first, self.heads.head_dim)
        return part

    def run(self, attend: Attend, steps: list[Step], window: int | None = None) -> list[torch.Tensor]:
        """Run the steps on a cache that is NaN where nothing was written; return the results by sequence."""
        needed = [-(-n // BLOCK_SIZE) for n in self.lengths]
        blocks = np.split(np.random.default_rng(len(steps)).permutation(sum(needed) + SPARE), np.cumsum(needed))
        tables = np.zeros((len(needed), max(needed) + 1), np.int32)
        for row, own in enumerate(blocks[:-1]):
            tables[row, : len(own)] = own
        shape = sum(needed) + SPARE, BLOCK_SIZE, *self.k[0].shape[1:]
        keys, values = (torch.full(shape, math.nan, dtype=self.q[0].dtype, device=self.device) for _ in range(2))
        results = [torch.full_like(q, math.nan) for q in self.q]
        for step in steps:
            inputs = self._inputs(step, tables)
            for stored, whole in ((keys, self.k), (values, self.v)):
                self._store(torch.cat([whole[s][a:b] for s, a, b in step]), stored, inputs.slots)
            q = torch.cat([self.q[s][a:b] for s, a, b in step])
            y = attend(q, (keys, values), self.heads, inputs, window)
            for (s, a, b), part in zip(step, y.split([b - a for _, a, b in step]), strict=True):
                results[s][a:b] = part
        return results

    def expected(self, window: int | None = None) -> list[torch.Tensor]:
        """Return the results in float64 on the CPU."""
        scale, kv_index = self.heads.head_dim**-0.5, self.heads.kv_index.cpu()
        return [
            plain_attention(q.cpu(), k.cpu(), v.cpu(), kv_index, scale, window)
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def schedules(self) -> dict[str, list[Step]]:
        """Return ways to run all tokens; the first has every sequence to itself."""
        whole = [(s, 0, n) for s, n in enumerate(self.lengths)]
        return {
            "one by one": [[sequence] for sequence in whole],
            "together": [whole],
            "other order": [whole[::-1]],
            "token by token": [[(s, i, i + 1) for s, _, n in whole if i < n] for i in range(max(self.lengths))],
            "chunks": self._chunks(),
        }

    def _chunks(self) -> list[Step]:
        """Single tokens and pieces of up to 40, in steps that leave out some sequences; single tokens come first."""
        rng, done, steps = np.random.default_rng(5), [0] * len(self.lengths), []
        while any(start < n for start, n in zip(done, self.lengths, strict=True)):
            step = []
            for s, n in enumerate(self.lengths):
                if done[s] < n and rng.random() < 0.8:
                    stop = min(n, done[s] + int(rng.choice([1, 1, rng.integers(2, 40)])))
                    step.append((s, done[s], stop))
                    done[s] = stop
            steps += [sorted(step, key=lambda piece: piece[2] - piece[1] > 1)] if step else []
        return steps

    def _inputs(self, step: Step, tables: np.ndarray) -> TiledInputs:
        used = tables[[s for s, _, _ in step]]
        positions = np.concatenate([np.arange(a, b) for _, a, b in step])
        ids = np.repeat(np.arange(len(step)), [b - a for _, a, b in step])
        slots = used[ids, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        num_single, tiles = tile(ids, tokens_per_tile(self.heads))
        tensors = (torch.from_numpy(part).to(self.device) for part in (positions, ids, used, slots))
        longest = int(positions[:num_single].max(initial=0)) + 1
        return TiledInputs(*tensors, num_single, torch.from_numpy(tiles).to(self.device), longest)

    @staticmethod
    def _store(new_TGD: torch.Tensor, stored_PSGD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write tokens where the kernels look for them: in the order [G, S, D] inside a block."""
        num_blocks, size, heads, width = stored_PSGD.shape
        stored_PSGD.view(num_blocks, heads, size, width)[slots_T // size, :, slots_T % size] = new_TGD
