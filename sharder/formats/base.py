"""What every checkpoint reader offers, and how bytes are read from a file.

Readers never map a file into memory: a tensor is read whole into memory of its own, so that the resident size of
the process is bounded by its largest tensor, and a truncated file is an error with a name instead of a SIGBUS.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import xxhash

from mpi_tp.errors import FileError
from mpi_tp.shards.format import num_bytes

READ_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in memory, in bytes."""
        return num_bytes(self.shape, self.dtype)


class CheckpointReader(Protocol):
    """A checkpoint, opened: its structure is known and checked, no weight has been read yet."""

    path: Path
    kind: str

    @property
    def config(self) -> dict[str, Any] | None:
        """Model configuration with Hugging Face field names, or None if the checkpoint holds none."""
        ...

    def names(self) -> list[str]:
        """Names of all tensors, in the order in which they lie in the source."""
        ...

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of the tensor that `read` returns for `name`."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Read the whole tensor: on the CPU, contiguous, in memory of its own.

        Raises FileError if the bytes cannot be read.
        """
        ...

    def source_size(self) -> int:
        """Bytes of all files that hold weights."""
        ...

    def header_digest(self) -> str:
        """xxh3_128, in hexadecimal, of all bytes that describe the tensors but are not tensor data."""
        ...

    def close(self) -> None:
        """Close all files; the reader cannot be used any more."""
        ...

    def __enter__(self) -> "CheckpointReader": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SingleFile(ABC):
    """The part of a reader that is the same for every format of one file: descriptor, size, header digest.

    A format parses its structure in `_parse`. Raises FileError if `path` cannot be opened, and whatever `_parse`
    raises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FileError(f"{path} cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self.fd).st_size
        self._header_hash = xxhash.xxh3_128()
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _parse(self) -> None:
        """Read and check everything but tensor data."""

    def read_header(self, offset: int, length: int, what: str) -> bytes:
        """Read `length` bytes that describe tensors; they become part of `header_digest`."""
        if offset + length > self.size:
            raise FileError(f"{self.path} is truncated: {what} ends at byte {offset + length}, the file at {self.size}")
        header = bytearray(length)
        pread_into(self.fd, memoryview(header), offset, self.path, what)
        self._header_hash.update(header)
        return bytes(header)

    def source_size(self) -> int:
        """Size of the file in bytes."""
        return self.size

    def header_digest(self) -> str:
        """xxh3_128 of the bytes that describe the tensors."""
        return self._header_hash.hexdigest()

    def close(self) -> None:
        """Close the file; the reader cannot be used any more."""
        os.close(self.fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pread_into(fd: int, buffer: memoryview, offset: int, path: Path, what: str) -> None:
    """Fill `buffer` from byte `offset` of the file; `path` and `what` (a tensor's name) are for the message.

    Raises FileError if the file ends before the buffer is full, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done : done + READ_CHUNK_BYTES]], offset + done)
        except OSError as error:
            raise FileError(f"{path}: reading {what} failed: {error.strerror}") from error
        if count == 0:
            raise FileError(
                f"{path} is truncated: {what} has {len(buffer)} bytes from byte {offset}, {done} of them are there"
            )
        done += count
