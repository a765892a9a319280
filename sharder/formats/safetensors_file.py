"""One `.safetensors` file, read or written: 8 bytes of length, a JSON header, then the tensors back to back.

When one is read, the header is checked in full before any tensor is: known dtypes, sizes that follow from shapes, and
ranges that cover the data section without gap or overlap.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.shards.checksum import tensor_bytes
from sharder.formats.base import SingleFile, TensorSpec, pread_into

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Entry:
    """One tensor of the header; `begin` and `end` are bytes from the start of the data section."""

    spec: TensorSpec
    begin: int
    end: int


class SafetensorsReader(SingleFile):
    """Tensors of one `.safetensors` file, in the order of the data section.

    Raises FileError for a damaged file, ConfigurationError for a dtype that torch does not have.
    """

    kind = "safetensors"
    config: dict[str, Any] | None = None

    def _parse(self) -> None:
        length = int.from_bytes(self.read_header(0, LENGTH_BYTES, "the header's length"), "little")
        if length > MAX_HEADER_BYTES:
            raise FileError(f"{self.path} is damaged: a header of {length} bytes, allowed are {MAX_HEADER_BYTES}")
        self._data_start = LENGTH_BYTES + length
        header = _parse_json(self.read_header(LENGTH_BYTES, length, "the header"), self.path)
        entries = [
            (name, _parse_entry(name, fields, self.path)) for name, fields in header.items() if name != "__metadata__"
        ]
        self._entries = dict(sorted(entries, key=lambda item: (item[1].begin, item[1].end)))
        self._check_coverage()

    def __enter__(self) -> "SafetensorsReader":
        return self

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of tensor `name`."""
        return self._entries[name].spec

    def read(self, name: str) -> torch.Tensor:
        """Read tensor `name`. Raises FileError."""
        entry = self._entries[name]
        tensor = torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
        pread_into(self.fd, tensor_bytes(tensor), self._data_start + entry.begin, self.path, name)
        return tensor

    def _check_coverage(self) -> None:
        """Check that the tensors cover the data section exactly."""
        position = 0
        for name, entry in self._entries.items():
            if entry.begin != position:
                problem = "overlaps the tensor before it" if entry.begin < position else "leaves a gap"
                raise FileError(
                    f"{self.path} is damaged: {name} {problem}: it begins at byte {entry.begin}, not {position}"
                )
            position = entry.end
        if self._data_start + position != self.size:
            raise FileError(
                f"{self.path} is damaged: by its header it has {self._data_start + position} bytes, "
                f"it has {self.size}; get it again"
            )


def _parse_json(header: bytes, path: Path) -> dict[str, Any]:
    """Parse the header; a repeated key would hide a tensor, so it is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError("a name occurs twice")
        return fields

    try:
        parsed = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: its header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise FileError(f"{path} is damaged: its header is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _parse_entry(name: str, fields: Any, path: Path) -> _Entry:
    """Check the header's fields of one tensor."""
    match fields:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]}:
            numbers = [*shape, begin, end]
        case _:
            raise FileError(f"{path} is damaged: {name} has no valid dtype, shape and data_offsets")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise FileError(f"{path} is damaged: {name} has shape {shape}, offsets {begin} and {end}")
    if code not in DTYPES:
        raise ConfigurationError(f"{path}: {name} has dtype {code}; known are {', '.join(DTYPES)}")
    spec = TensorSpec(DTYPES[code], tuple(shape))
    if end - begin != spec.num_bytes:
        raise FileError(
            f"{path} is damaged: {name} takes {end - begin} bytes, {code} {shape} is {spec.num_bytes} bytes"
        )
    return _Entry(spec, begin, end)


def write_safetensors(file: BinaryIO, specs: Mapping[str, TensorSpec], tensors: Iterable[torch.Tensor]) -> None:
    """Write contiguous CPU `tensors`, which come one by one in the order of their `specs`; OSError if that fails."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, spec in specs.items():
        end = position + spec.num_bytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for tensor in tensors:
        file.write(tensor_bytes(tensor))
