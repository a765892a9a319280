"""How the blocks that a collective moves lie in memory: each rank's block flat, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch

HALVES = (torch.bfloat16, torch.float16)
"""The types whose sums are taken in float32."""


@dataclass(frozen=True)
class GatherLayout:
    """What an all-gather of blocks along one dim receives, and what it makes of it."""

    dim: int
    """The dim of the blocks, not negative."""
    counts: tuple[int, ...]
    """Elements in each rank's block."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each rank's block."""
    strides: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    """Shape of the joined blocks."""
    is_joined: bool
    """Whether flat blocks, one after the other, are the result already: one token, or a gather along dim 0."""


@lru_cache
def gather_layout(shape: tuple[int, ...], sizes: tuple[int, ...], dim: int) -> GatherLayout:
    """Lay out the blocks of `shape`, with `sizes[r]` along `dim` on rank r. Remembered: a decode loop asks often."""
    dim %= len(shape)
    shapes = tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)
    return GatherLayout(
        dim=dim,
        counts=tuple(prod(block) for block in shapes),
        shapes=shapes,
        strides=tuple(tuple(prod(block[d + 1 :]) for d in range(len(block))) for block in shapes),
        result=(*shape[:dim], sum(sizes), *shape[dim + 1 :]),
        is_joined=prod(shape[:dim]) == 1,
    )


def join(flat: torch.Tensor, offsets: Sequence[int], layout: GatherLayout) -> torch.Tensor:
    """Concatenate the blocks that begin at `offsets` of `flat`, into a new tensor."""
    blocks = zip(layout.shapes, layout.strides, offsets, strict=True)
    return torch.cat([flat.as_strided(shape, stride, offset) for shape, stride, offset in blocks], layout.dim)


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Return where each block begins if they lie one after the other."""
    return list(accumulate(counts, initial=0))[:-1]


def check_contiguous(tensor: torch.Tensor) -> None:
    """Assert what every collective needs and no library checks."""
    assert tensor.is_contiguous(), f"tensor {list(tensor.shape)}, strides {tensor.stride()}, is not contiguous"


def check_own_size(tensor: torch.Tensor, sizes: Sequence[int], rank: int, dim: int) -> None:
    """Assert that the tensor to gather is as large as its rank has announced."""
    assert tensor.shape[dim] == sizes[rank], f"sizes {list(sizes)}, rank {rank} has {list(tensor.shape)}"


def check_total_size(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> None:
    """Assert that the tensor to scatter is as large as its blocks together."""
    assert tensor.shape[dim] == sum(sizes), f"sizes {list(sizes)}, tensor {list(tensor.shape)}"
