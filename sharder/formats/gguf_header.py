"""Parser of a GGUF header: metadata and tensor table.

The `gguf` package has one too, but it maps the whole file, takes seconds for a large vocabulary, and walks a damaged
length field to its end.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mpi_tp.errors import ConfigurationError, FileError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table; `shape` as torch has it (GGUF's order reversed), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    stored_as: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of the last dimension."""
        block_elements, block_bytes = GGML_QUANT_SIZES[self.stored_as]
        return self.shape[-1] // block_elements * block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """A parsed header of `length` bytes."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    length: int


def parse_header(file: BinaryIO, size: int, path: Path) -> GgufHeader:
    """Parse the header of a GGUF file of `size` bytes, open at its start.

    Raises FileError if it is damaged, ConfigurationError for a version or a tensor type that is not known.
    """
    cursor = _Cursor(file, size, path)
    cursor.take(4, "the magic number")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        raise ConfigurationError(f"{path} is GGUF version {version} (or big-endian); known are 2 and 3")
    num_tensors = cursor.scalar("Q", "the number of tensors")
    num_fields = cursor.scalar("Q", "the number of metadata fields")
    metadata = cursor.unique(cursor.field() for _ in range(num_fields))
    table = cursor.unique(cursor.tensor() for _ in range(num_tensors))
    length = cursor.position
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise FileError(f"{path} is damaged: alignment {alignment}")
    data_start = -(-length // alignment) * alignment
    tensors = tuple(
        _check_tensor(name, shape, code, data_start + offset, path) for name, (shape, code, offset) in table.items()
    )
    _check_ranges(tensors, size, path)
    return GgufHeader(metadata, tensors, length)


class _Cursor:
    """Reads a header front to back and never past the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file = file
        self._size = size
        self._path = path
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes."""
        if count > self._size - self.position:
            raise FileError(
                f"{self._path} is damaged or truncated: {what} needs {count} bytes at byte {self.position}, "
                f"the file has {self._size}"
            )
        self.position += count
        return self._file.read(count)

    def scalar(self, code: str, what: str) -> Any:
        """Return one little-endian number; `code` as in the struct module."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        """Return a string with its length in front."""
        text = self.take(self.scalar("Q", what), what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{self._path} is damaged: {what} is not UTF-8") from error

    def field(self) -> tuple[str, Any]:
        """Return key and value of one metadata field."""
        key = self.string("a metadata key")
        return key, self._value(self.scalar("I", key), key)

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Return a tensor's name and its shape, type code and offset in the data section."""
        name = self.string("a tensor's name")
        num_dimensions = self.scalar("I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise FileError(f"{self._path} is damaged: {name} has {num_dimensions} dimensions")
        shape = tuple(self.scalar("Q", name) for _ in range(num_dimensions))[::-1]
        return name, (shape, self.scalar("I", name), self.scalar("Q", name))

    def unique(self, pairs: Any) -> dict[str, Any]:
        """Collect (name, value) pairs; a second value of one name would hide the first."""
        collected: dict[str, Any] = {}
        for name, value in pairs:
            if name in collected:
                raise FileError(f"{self._path} is damaged: {name} occurs twice")
            collected[name] = value
        return collected

    def _value(self, type_code: int, key: str) -> Any:
        if type_code == STRING:
            return self.string(key)
        if type_code == ARRAY:
            return self._array(key)
        if type_code in SCALARS:
            return self.scalar(SCALARS[type_code], key)
        raise FileError(f"{self._path} is damaged: metadata field {key} has the unknown type {type_code}")

    def _array(self, key: str) -> list[Any]:
        element_code, count = self.scalar("I", key), self.scalar("Q", key)
        if element_code == ARRAY:
            raise ConfigurationError(f"{self._path}: metadata field {key} is an array of arrays, which no model has")
        if element_code in SCALARS:
            code = SCALARS[element_code]
            packed = self.take(count * struct.calcsize(f"<{code}"), key)
            return list(struct.unpack(f"<{count}{code}", packed))
        return [self._value(element_code, key) for _ in range(count)]


def _check_tensor(name: str, shape: tuple[int, ...], code: int, offset: int, path: Path) -> GgufTensor:
    """Check type and row length of a row of the tensor table."""
    try:
        stored_as = GGMLQuantizationType(code)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {name} has type {code}, which this gguf package does not know") from error
    if 0 in shape:
        raise FileError(f"{path} is damaged: {name} has the shape {list(shape)}")
    block_elements = GGML_QUANT_SIZES[stored_as][0]
    if shape[-1] % block_elements:
        raise FileError(
            f"{path} is damaged: {name} has rows of {shape[-1]} elements, {stored_as.name} blocks have {block_elements}"
        )
    return GgufTensor(name, shape, stored_as, offset)


def _check_ranges(tensors: tuple[GgufTensor, ...], size: int, path: Path) -> None:
    """Check that all tensors lie inside the file and do not overlap."""
    end, previous = 0, "the header"
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise FileError(f"{path} is damaged: {tensor.name} overlaps {previous}")
        end, previous = tensor.offset + tensor.num_bytes, tensor.name
        if end > size:
            raise FileError(f"{path} is truncated: {tensor.name} ends at byte {end}, the file at {size}")
