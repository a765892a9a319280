"""How the blocks that a collective moves lie in memory: each rank's block flat, one after the other."""

from collections.abc import Sequence
from math import prod

import torch

HALVES = (torch.bfloat16, torch.float16)
"""The types whose sums are taken in float32."""


def outer_size(shape: Sequence[int], dim: int) -> int:
    """Return the product of the dimensions before `dim`; where it is 1, joined blocks lie one after the other."""
    return prod(shape[:dim])


def unit_size(shape: Sequence[int], dim: int) -> int:
    """Return how many elements there are for each index along `dim`."""
    return outer_size(shape, dim) * prod(shape[dim + 1 :])


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Return `shape` with `size` along `dim` (not negative)."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def join(blocks: Sequence[torch.Tensor], shape: Sequence[int], sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Concatenate flat blocks, block r of shape `shape` but for `sizes[r]` along `dim`."""
    parts = [block.view(resized(shape, dim, size)) for block, size in zip(blocks, sizes, strict=True)]
    return torch.cat(parts, dim)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat view: moving a tensor needs no type."""
    return tensor.view(-1).view(torch.uint8)


def check_contiguous(tensor: torch.Tensor) -> None:
    """Assert what every collective needs and no library checks."""
    assert tensor.is_contiguous(), f"tensor {list(tensor.shape)}, strides {tensor.stride()}, is not contiguous"


def check_own_size(tensor: torch.Tensor, sizes: Sequence[int], rank: int, dim: int) -> None:
    """Assert that the tensor to gather is as large as its rank has announced."""
    assert tensor.shape[dim] == sizes[rank], f"sizes {list(sizes)}, rank {rank} has {list(tensor.shape)}"


def check_total_size(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> None:
    """Assert that the tensor to scatter is as large as its blocks together."""
    assert tensor.shape[dim] == sum(sizes), f"sizes {list(sizes)}, tensor {list(tensor.shape)}"
