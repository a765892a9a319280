"""Whole tensors out of the parts of all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from mpi_tp.errors import FileError
from mpi_tp.shards.checksum import tensor_bytes, tensor_checksum
from mpi_tp.shards.format import TensorEntry
from mpi_tp.shards.rank_file import RankFile
from mpi_tp.shards.reader import ShardSet


@dataclass(frozen=True)
class Joiner:
    """All rank files of a set, opened."""

    shards: ShardSet
    files: list[RankFile]

    def join(self, entry: TensorEntry) -> torch.Tensor:
        """Return the whole tensor, every rank's part of which was read and compared with its checksum.

        Raises FileError if a part is damaged, if ranks that share indices disagree, or if the whole is not what was
        sharded.
        """
        if entry.planned.axis is None:
            whole = self._join_replicas(entry)
        else:
            whole = self._join_slices(entry, entry.planned.axis)
        if tensor_checksum(whole) != entry.checksum:
            raise FileError(
                f"{self.shards.directory}/: the parts of tensor {entry.name} do not join to the tensor that was "
                f"sharded: its checksum is {tensor_checksum(whole)}, the manifest says {entry.checksum}"
            )
        return whole

    def _join_replicas(self, entry: TensorEntry) -> torch.Tensor:
        whole = self.files[0].read(entry.name)
        for file in self.files[1:]:
            self._check_same(entry, file, whole, file.read(entry.name))
        return whole

    def _join_slices(self, entry: TensorEntry, axis: int) -> torch.Tensor:
        whole = torch.empty(entry.planned.shape, dtype=entry.dtype)
        filled = 0
        for file in self.files:
            part, position = file.read(entry.name), 0
            for start, stop in entry.local_ranges(file.rank):
                slice_ = part.narrow(axis, position, stop - start)
                position += stop - start
                if start < filled:
                    shared = min(stop, filled) - start
                    self._check_same(entry, file, whole.narrow(axis, start, shared), slice_.narrow(axis, 0, shared))
                whole.narrow(axis, start, stop - start).copy_(slice_)
                filled = max(filled, stop)
        return whole

    def _check_same(self, entry: TensorEntry, file: RankFile, other: torch.Tensor, found: torch.Tensor) -> None:
        """Compare bits, because a number that is none does not equal itself."""
        if tensor_bytes(other.contiguous()) != tensor_bytes(found.contiguous()):
            raise FileError(
                f"{file.path}: tensor {entry.name} of rank {file.rank} differs from what lower ranks hold of it: "
                "shard the source again"
            )


@contextmanager
def open_joiner(shards: ShardSet) -> Iterator[Joiner]:
    """Open the files of all ranks; raises FileError as `RankFile` does."""
    with ExitStack() as stack:
        yield Joiner(shards, [stack.enter_context(shards.open_rank(rank)) for rank in range(shards.ranks)])
