"""Splitting an axis over ranks, evenly or not.

A range is a half-open pair (start, stop). A rank's share of an axis is a tuple of ranges, empty ranges left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Range = tuple[int, int]

VECTOR_UNIT = 16
"""Features are dealt out in units of 16 where there are enough of them, so that slices stay aligned."""


def block_range(n: int, size: int, rank: int, unit: int = 1) -> Range:
    """Return rank `rank`'s range of 0 … n - 1, dealt to `size` ranks in whole units; low ranks get one unit more.

    The last unit is shorter when `unit` does not divide n. A rank for which nothing is left gets an empty range.
    """
    quotient, remainder = divmod(-(-n // unit), size)
    start = rank * quotient + min(rank, remainder)
    stop = start + quotient + (rank < remainder)
    return min(start * unit, n), min(stop * unit, n)


def length(ranges: Sequence[Range]) -> int:
    """Return how many indices the ranges hold."""
    return sum(stop - start for start, stop in ranges)


class AxisPartition(Protocol):
    """How one axis of a tensor is split over any number of ranks."""

    def ranges(self, rank: int, size: int) -> tuple[Range, ...]:
        """Return the ranges that rank `rank` of `size` holds."""
        ...


def _without_empty(span: Range) -> tuple[Range, ...]:
    return (span,) if span[0] < span[1] else ()


@dataclass(frozen=True)
class Blocks:
    """`n` features in one block a rank."""

    n: int

    def ranges(self, rank: int, size: int) -> tuple[Range, ...]:
        """Return the block of rank `rank`."""
        unit = VECTOR_UNIT if self.n >= VECTOR_UNIT * size else 1
        return _without_empty(block_range(self.n, size, rank, unit))


@dataclass(frozen=True)
class QueryHeads:
    """The features of `num_heads` query heads, whole heads to a rank."""

    num_heads: int
    head_dim: int

    def heads(self, rank: int, size: int) -> Range:
        """Return the query heads of rank `rank`."""
        return block_range(self.num_heads, size, rank)

    def ranges(self, rank: int, size: int) -> tuple[Range, ...]:
        """Return the features of the rank's heads."""
        start, stop = self.heads(rank, size)
        return _without_empty((start * self.head_dim, stop * self.head_dim))


@dataclass(frozen=True)
class KeyValueHeads:
    """The features of the key/value heads that a rank's query heads read; a head may belong to several ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def heads(self, rank: int, size: int) -> Range:
        """Return the key/value heads of rank `rank`: those of the first to the last of its query heads."""
        start, stop = block_range(self.num_heads, size, rank)
        group = self.num_heads // self.num_kv_heads
        return start // group, (stop - 1) // group + 1

    def index(self, rank: int, size: int) -> list[int]:
        """Return, for each query head of the rank, which of the rank's key/value heads it reads."""
        start, stop = block_range(self.num_heads, size, rank)
        group = self.num_heads // self.num_kv_heads
        return [head // group - start // group for head in range(start, stop)]

    def ranges(self, rank: int, size: int) -> tuple[Range, ...]:
        """Return the features of the rank's key/value heads."""
        start, stop = self.heads(rank, size)
        return _without_empty((start * self.head_dim, stop * self.head_dim))
