"""One rank's file, opened for reading: structure through h5py, bytes straight from the file.

Nothing in the file is believed before it was compared with the manifest.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import torch
import xxhash
from h5py import h5d

from mpi_tp.errors import FileError, StoppedError
from mpi_tp.shards.checksum import CHUNK_BYTES, digest_outside, tensor_bytes
from mpi_tp.shards.dtypes import hdf5_type
from mpi_tp.shards.format import FileEntry, Manifest, PartEntry, TensorEntry, part_attributes, root_attributes


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
            self.tensors: Mapping[str, PartEntry] = _read_structure(self.path, entry, manifest, rank)
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


def damaged(path: Path, what: str) -> FileError:
    """Return the error for a file of a set that is not as it was written."""
    return FileError(f"{path} is damaged: {what}: shard the source again")


def open_sized(path: Path, entry: FileEntry) -> int:
    """Open a file of a set and return its descriptor; FileError if it is missing or has another size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{path} cannot be opened: {error.strerror}") from error
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        os.close(descriptor)
        raise damaged(path, f"it has {size} bytes, the manifest says {entry.size}")
    return descriptor


def _read_structure(path: Path, entry: FileEntry, manifest: Manifest, rank: int) -> dict[str, PartEntry]:
    """Return what the file holds, by name in the manifest's order."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_root(path, file, manifest, rank)
            parts = {
                tensor.name: _read_part(path, file[tensor.name], tensor, rank) for tensor in manifest.tensors.values()
            }
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise damaged(path, f"HDF5 cannot read it ({reason})") from error
    _check_extents(path, parts, entry.size)
    return parts


def _check_root(path: Path, file: h5py.File, manifest: Manifest, rank: int) -> None:
    attributes = _plain_attributes(file)
    if attributes.get("set_id") != manifest.set_id:
        raise FileError(
            f"{path} belongs to shard set {attributes.get('set_id')}, manifest.json describes {manifest.set_id}: "
            "files of two sets are mixed: shard the source again"
        )
    _check_equal(path, "", attributes, root_attributes(manifest.options, manifest.set_id, rank))
    for name in {*file, *manifest.tensors}:
        if name not in manifest.tensors:
            raise damaged(path, f"it holds {name}, which the manifest does not know")
        if name not in file:
            raise damaged(path, f"tensor {name} of rank {rank} is missing")
        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise damaged(path, f"tensor {name} of rank {rank} is a link to somewhere else")
        if file.get(name, getclass=True) is not h5py.Dataset:
            raise damaged(path, f"tensor {name} of rank {rank} is no dataset")


def _read_part(path: Path, dataset: Any, tensor: TensorEntry, rank: int) -> PartEntry:
    """Return the part of `tensor` that `dataset` holds, after comparing everything but its elements."""
    creation = dataset.id.get_create_plist()
    attributes = _plain_attributes(dataset)
    checksum = attributes.get("xxh3_128", "")
    shape = tensor.planned.local_shape(rank)
    found = {
        **attributes,
        "layout": creation.get_layout(),
        "filters": creation.get_nfilters(),
        "external files": creation.get_external_count(),
        "shape": dataset.shape,
        "stored type is the dtype's": dataset.id.get_type() == hdf5_type(tensor.dtype),
    }
    expected = {
        **part_attributes(tensor, rank, checksum),
        "layout": h5d.CONTIGUOUS,
        "filters": 0,
        "external files": 0,
        "shape": shape,
        "stored type is the dtype's": True,
    }
    _check_equal(path, f"tensor {tensor.name} of rank {rank}: ", found, expected)
    return PartEntry(tensor.name, tensor.dtype, shape, checksum, dataset.id.get_offset() or 0)


def _check_extents(path: Path, parts: Mapping[str, PartEntry], size: int) -> None:
    """Check that the elements of no two tensors overlap and that all lie in the file."""
    end = 0
    for part in sorted((part for part in parts.values() if part.num_bytes), key=lambda part: part.offset):
        if part.offset == 0:
            raise damaged(path, f"tensor {part.name} has no space in it")
        if part.offset < end:
            raise damaged(path, f"tensor {part.name} at byte {part.offset} lies in the space of another")
        end = part.offset + part.num_bytes
        if end > size:
            raise damaged(path, f"tensor {part.name} ends at byte {end}, the file at {size}")


def _check_equal(path: Path, where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise damaged(path, f"{where}{name} is {found.get(name)!r} instead of {expected.get(name)!r}")


def _plain_attributes(item: Any) -> dict[str, Any]:
    """Return an HDF5 object's attributes as texts, numbers and lists."""
    return {name: value.decode() if isinstance(value, bytes) else value.tolist() for name, value in item.attrs.items()}
