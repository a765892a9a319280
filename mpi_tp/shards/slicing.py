"""A rank's part of a whole tensor."""

from collections.abc import Sequence

import torch

from mpi_tp.partition.ranges import Range


def take_part(tensor: torch.Tensor, axis: int, ranges: Sequence[Range]) -> torch.Tensor:
    """Return the slices of `tensor` at `ranges` along `axis`, one after the other; contiguous.

    One range of rows is a view of `tensor`, everything else a copy.
    """
    slices = [tensor.narrow(axis, start, stop - start) for start, stop in ranges]
    if len(slices) == 1:
        return slices[0].contiguous()
    return torch.cat([tensor.narrow(axis, 0, 0), *slices], dim=axis)
