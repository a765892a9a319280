"""xxh3-128 checksums of tensors, files, and of what lies between a file's datasets."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash

from mpi_tp.errors import FileError
from mpi_tp.shards.format import FileEntry

CHUNK_BYTES = 16 << 20
"""Files are read in pieces of at most this many bytes."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def checksum(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes."""
    return str(xxhash.xxh3_128_hexdigest(data))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a contiguous CPU tensor's elements in C order."""
    return checksum(tensor_bytes(tensor))


def file_entry(path: Path) -> FileEntry:
    """Return a file's entry in the manifest, with the checksum of all its bytes; FileError if it cannot be read."""
    digest = xxhash.xxh3_128()
    size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    return FileEntry(path.name, size, str(digest.hexdigest()))


def digest_outside(descriptor: int, size: int, extents: Iterable[tuple[int, int]]) -> str:
    """Return the checksum of an open file's bytes 0 … size - 1 outside the (start, stop) extents, in file order.

    OSError if the file cannot be read; one that is shorter than `size` just gives another checksum.
    """
    digest = xxhash.xxh3_128()
    position = 0
    for start, stop in [*sorted(extents), (size, size)]:
        for offset in range(position, start, CHUNK_BYTES):
            digest.update(os.pread(descriptor, min(CHUNK_BYTES, start - offset), offset))
        position = stop
    return str(digest.hexdigest())
