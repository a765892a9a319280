"""From a family's tensor table to every rank's share of every tensor.

A table has one row a tensor of the checkpoint. A tensor that matches no row, or a row without tensor, is an error:
nothing is replicated because nobody thought of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mpi_tp.partition.ranges import AxisPartition, Range, length

Strategy = Literal["column_wise", "paired"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

SplitAxis = tuple[int, AxisPartition]
"""The axis that is split and how."""

REPLICATED = None
"""In the place of a SplitAxis: every rank holds the tensor whole."""


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a checkpoint and the axis that each strategy splits, or REPLICATED."""

    name: str
    shape: tuple[int, ...]
    column_wise: SplitAxis | None
    paired: SplitAxis | None

    def split(self, strategy: Strategy) -> SplitAxis | None:
        """Return the axis that `strategy` splits and how."""
        return self.column_wise if strategy == "column_wise" else self.paired


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor and what each rank holds of it.

    `ranges[r]` are rank r's along `axis`; with `axis` None every rank holds the whole tensor and `ranges` is empty.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of rank `rank`'s part."""
        if self.axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.axis] = length(self.ranges[rank])
        return tuple(shape)

    @property
    def sizes(self) -> list[int]:
        """How many indices along `axis` each rank holds."""
        return [length(spans) for spans in self.ranges]


Plan = Mapping[str, PlannedTensor]


def plan_shards(rows: Sequence[TensorRow], strategy: Strategy, size: int) -> dict[str, PlannedTensor]:
    """Return each row's tensor, by name, with the ranges of all `size` ranks."""
    return {row.name: _plan_tensor(row, strategy, size) for row in rows}


def _plan_tensor(row: TensorRow, strategy: Strategy, size: int) -> PlannedTensor:
    split = row.split(strategy)
    if split is REPLICATED:
        return PlannedTensor(row.name, row.shape, None, ())
    axis, partition = split
    return PlannedTensor(row.name, row.shape, axis, tuple(partition.ranges(rank, size) for rank in range(size)))
