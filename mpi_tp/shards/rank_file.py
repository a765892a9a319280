"""One rank's file, opened for reading: structure through h5py, bytes straight from the file.

Nothing in the file is believed before it was compared with the manifest.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
import xxhash

from mpi_tp.errors import FileError, StoppedError
from mpi_tp.shards.checksum import CHUNK_BYTES, digest_outside, tensor_bytes
from mpi_tp.shards.format import FileEntry, Manifest, PartEntry
from mpi_tp.shards.rank_structure import damaged, read_structure


class RankFile:
    """The tensors of one rank; several threads may read at once.

    `RankFile(directory, manifest, rank)` raises FileError if the file is missing, truncated, damaged, of another set,
    or holds anything that the manifest does not describe. Only its metadata was read then.
    """

    def __init__(self, directory: Path, manifest: Manifest, rank: int) -> None:
        entry = manifest.files[rank]
        self.path = directory / entry.name
        self.rank = rank
        self._interrupted = False
        self._descriptor = open_sized(self.path, entry)
        try:
            self.tensors: Mapping[str, PartEntry] = read_structure(self.path, entry.size, manifest, rank)
            self._check_digest(entry)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RankFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the tensors that were read stay."""
        os.close(self._descriptor)

    def read(self, name: str) -> torch.Tensor:
        """Return this rank's part of tensor `name` in memory of its own, aligned to 64 bytes, its checksum verified.

        Raises FileError naming file, tensor and rank if it cannot be read or is damaged.
        """
        part = self.tensors[name]
        tensor = torch.empty(part.shape, dtype=part.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Read into a contiguous CPU tensor of the part's shape and dtype; raises FileError as `read` does."""
        elements = tensor_bytes(tensor)
        starts = range(0, len(elements), CHUNK_BYTES)
        for _ in self.pieces(name, (elements[start : start + CHUNK_BYTES] for start in starts)):
            pass

    def pieces(self, name: str, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Read tensor `name` piece by piece, each into the next of `buffers`, and yield every piece once it is there.

        A piece fills its buffer, but for the last one. Exhaust the iterator: the checksum is verified at its end.
        Raises FileError as `read` does, StoppedError after `interrupt`.
        """
        part = self.tensors[name]
        digest = xxhash.xxh3_128()
        source = iter(buffers)
        position = 0
        while position < part.num_bytes:
            piece = next(source)[: part.num_bytes - position]
            self._fill(name, piece, part.offset + position)
            digest.update(piece)
            position += len(piece)
            yield piece
        if digest.hexdigest() != part.checksum:
            raise FileError(
                f"{self.path}: tensor {name} of rank {self.rank} is damaged: its checksum is {digest.hexdigest()}, "
                f"written was {part.checksum}: shard the source again"
            )

    def interrupt(self) -> None:
        """End the reads that other threads are in with a StoppedError, soon; nothing can be read after it."""
        self._interrupted = True

    def _fill(self, name: str, buffer: memoryview, offset: int) -> None:
        where = f"{self.path}: tensor {name} of rank {self.rank}"
        position = 0
        while position < len(buffer):
            if self._interrupted:
                raise StoppedError(f"{where} was not read to its end")
            try:
                count = os.preadv(self._descriptor, [buffer[position:]], offset + position)
            except OSError as error:
                raise FileError(f"{where} cannot be read: {error.strerror}") from error
            if not count:
                raise FileError(f"{where} is cut off at byte {offset + position}: shard the source again")
            position += count

    def _check_digest(self, entry: FileEntry) -> None:
        extents = [(part.offset, part.offset + part.num_bytes) for part in self.tensors.values() if part.num_bytes]
        try:
            digest = digest_outside(self._descriptor, entry.size, extents)
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror}") from error
        if digest != entry.digest:
            raise damaged(self.path, f"the digest of its metadata is {digest}, the manifest says {entry.digest}")


def open_sized(path: Path, entry: FileEntry) -> int:
    """Open a file of a set and return its descriptor; FileError if it is missing or has another size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    except OSError as error:
        raise FileError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is no file but a folder, a pipe or a device")
    if (size := status.st_size) != entry.size:
        os.close(descriptor)
        raise damaged(path, f"it has {size} bytes, the manifest says {entry.size}")
    return descriptor
