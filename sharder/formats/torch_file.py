"""Reader of a `torch.save` file (zip format) that runs no pickled code and loads no more than it is asked for.

The file is a zip archive: `data.pkl`, the pickled structure, and one uncompressed record `data/KEY` a storage. The
structure goes through torch's own weights-only unpickler, which knows tensors and containers and refuses everything
else. Storages are created on the meta device there, without memory; each is marked with the place of its record, and
the data is read from there. Why not `torch.load(map_location="meta")`: it *computes* those places from torch's own zip
writer, and so gives wrong ones, silently, for an archive that another tool has packed again.
"""

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch._weights_only_unpickler import Unpickler, get_globals_in_pkl

from mpi_tp.errors import ConfigurationError, FileError, JobError
from mpi_tp.shards.checksum import tensor_bytes
from sharder.formats.base import SingleFile, TensorSpec, pread_into

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of the extra field after the header
ANY_HEADER = b"PK"  # what comes after a record's data, be it another's header, a descriptor or the directory
MODEL_KEYS = ("model", "state_dict")
RESAVE = "load it in PyTorch and save it again with torch.save(model.state_dict(), …)"


@dataclass(frozen=True)
class _Record:
    """Where the bytes of one storage lie in the file."""

    offset: int
    size: int


@dataclass(frozen=True)
class _Entry:
    """One tensor: a strided view (strides in elements) that begins at byte `offset` of the file."""

    spec: TensorSpec
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Elements of the storage from the view's first to its last."""
        return _span(self.spec.shape, self.stride)


class TorchFileReader(SingleFile):
    """Tensors of a `torch.save` file: a state dict, or `{"model" | "state_dict": …, "config": {…}}`.

    Raises FileError for a damaged file, ConfigurationError for one that holds anything but tensors.
    """

    kind = "torch"

    def _parse(self) -> None:
        pickled, records = self._read_archive()
        state_dict, self.config = _split_config(_unpickle(pickled, records, self.path), self.path)
        sizes = {record.offset: record.size for record in records.values()}
        self._entries = {name: _locate(name, tensor, sizes, self.path) for name, tensor in state_dict.items()}

    def __enter__(self) -> "TorchFileReader":
        return self

    def names(self) -> list[str]:
        """Names of all tensors, as the state dict has them."""
        return list(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of tensor `name`."""
        return self._entries[name].spec

    def read(self, name: str) -> torch.Tensor:
        """Read tensor `name`: of a view the bytes from its first element to its last. Raises FileError."""
        entry = self._entries[name]
        elements = torch.empty(entry.span, dtype=entry.spec.dtype)
        pread_into(self.fd, tensor_bytes(elements), entry.offset, self.path, name)
        return elements.as_strided(entry.spec.shape, entry.stride).contiguous()

    def _read_archive(self) -> tuple[bytes, dict[str, _Record]]:
        """Return `data.pkl` and, by key, the records of the storages."""
        with open(self.fd, "rb", closefd=False) as file:
            with _zip_errors(self.path):
                archive = zipfile.ZipFile(file)
            members = _members(archive.infolist(), self.size, self.path)
            root = _find_root(members, self.path)
            with _zip_errors(self.path):
                byte_order = archive.read(f"{root}/byteorder") if f"{root}/byteorder" in members else b"little"
                pickled = archive.read(f"{root}/data.pkl")
        if byte_order != b"little":
            raise ConfigurationError(f"{self.path} was saved on a {byte_order!r}-endian machine; {RESAVE} here")
        self._header_hash.update(pickled)
        prefix = f"{root}/data/"
        data = {name[len(prefix) :]: member for name, member in members.items() if name.startswith(prefix)}
        return pickled, {key: self._locate_record(member) for key, member in sorted(data.items())}

    def _locate_record(self, member: zipfile.ZipInfo) -> _Record:
        """Find a member's data behind its local header, whose length only the header itself tells."""
        self._header_hash.update(f"{member.filename} {member.file_size} {member.CRC}".encode())
        header = self.read_header(member.header_offset, LOCAL_HEADER.size, f"zip record {member.filename}")
        signature, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = member.header_offset + LOCAL_HEADER.size
        record = _Record(start + name_length + extra_length, member.file_size)
        if signature != b"PK\x03\x04" or record.offset + record.size > self.size:
            raise FileError(
                f"{self.path} is damaged: zip record {member.filename} has {record.size} bytes "
                f"from byte {record.offset}, the file {self.size}"
            )
        name = self.read_header(start, name_length, f"zip record {member.filename}")
        following = self.read_header(record.offset + record.size, len(ANY_HEADER), f"the end of {member.filename}")
        if name != member.orig_filename.encode() or following != ANY_HEADER:
            raise FileError(f"{self.path} is damaged: zip record {member.filename} is not where its header says")
        return record


@contextmanager
def _zip_errors(path: Path) -> Iterator[None]:
    """Turn what zipfile raises for a damaged archive into a FileError."""
    try:
        yield
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error) as error:
        raise FileError(f"{path} is damaged or truncated: {error}; get it again") from error


def _members(entries: Sequence[zipfile.ZipInfo], size: int, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's records by name, each once, each no larger than the file."""
    members: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        if entry.filename in members:
            raise FileError(f"{path} is damaged: zip record {entry.filename} is there twice")
        if entry.compress_size > size:
            raise FileError(f"{path} is damaged: zip record {entry.filename} has {entry.compress_size} of {size} bytes")
        members[entry.filename] = entry
    return members


def _find_root(members: Mapping[str, zipfile.ZipInfo], path: Path) -> str:
    """Return the one top-level folder of the archive, whose records must lie in it as they are."""
    roots = [name.split("/")[0] for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise ConfigurationError(f"{path} is a zip archive without data.pkl, not a torch.save file")
    if f"{roots[0]}/constants.pkl" in members:
        raise ConfigurationError(f"{path} is a TorchScript archive, which holds code; {RESAVE}")
    packed = [
        name
        for name, member in members.items()
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size
    ]
    if packed:
        raise ConfigurationError(f"{path}: zip record {packed[0]} is compressed; {RESAVE}")
    return roots[0]


class _StructureUnpickler(Unpickler):
    """Gives meta tensors, whose storages carry the file offset of their data."""

    def __init__(self, pickled: bytes, records: Mapping[str, _Record], path: Path) -> None:
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._records = records
        self._path = path

    def persistent_load(self, pid: tuple[str, Any, str, str, int]) -> torch.storage.TypedStorage:
        """Return the storage that `pid` (kind, storage type, record key, device, number of elements) names."""
        _, storage_type, key, _, num_elements = pid
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        size = num_elements * dtype.itemsize
        stored = self._records[key].size if key in self._records else 0
        if key not in self._records or stored < size:
            raise FileError(f"{self._path} is damaged: storage {key} has {size} bytes, {stored} of them are there")
        storage = torch.UntypedStorage(size, device="meta")
        storage._checkpoint_offset = self._records[key].offset
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _unpickle(pickled: bytes, records: Mapping[str, _Record], path: Path) -> Any:
    """Return the pickled structure with meta tensors. Raises ConfigurationError if it asks for anything else."""
    try:
        # Weights are not made of them, and one call reserves whatever number of bytes the file says.
        if "builtins.bytearray" in get_globals_in_pkl(io.BytesIO(pickled)):
            raise UnpicklingError("GLOBAL builtins.bytearray ")
        return _StructureUnpickler(pickled, records, path).load()
    except JobError:  # a damaged storage, or a signal
        raise
    except UnpicklingError as error:
        reason = _one_line(error)
        raise ConfigurationError(f"{path} asks for more than tensors, refused: {reason}; {RESAVE}") from error
    except Exception as error:  # a hostile stream can fail in any way inside the unpickler
        raise ConfigurationError(f"{path} does not hold a state dict: {_one_line(error)}; {RESAVE}") from error


def _one_line(error: Exception) -> str:
    """Return the first sentence of a message that may quote anything from the file."""
    return " ".join(str(error).split(". ")[0].split())[:200]


def _split_config(content: Any, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Return state dict and config of what the file holds."""
    wrappers = [key for key in MODEL_KEYS if isinstance(content, dict) and isinstance(content.get(key), dict)]
    if len(wrappers) > 1:
        raise ConfigurationError(f'{path} holds both "model" and "state_dict"; save only one of them')
    state_dict, config = (content[wrappers[0]], content.get("config")) if wrappers else (content, None)
    if not isinstance(state_dict, dict):
        raise ConfigurationError(f"{path} holds a {type(state_dict).__name__}, not a state dict; {RESAVE}")
    if config is not None and not isinstance(config, dict):
        raise ConfigurationError(f'{path}: "config" is a {type(config).__name__}, not a dict')
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"{path}: {name!r} is a {type(tensor).__name__}, a state dict has named tensors; {RESAVE}"
            )
    return state_dict, config


def _locate(name: str, tensor: torch.Tensor, sizes: Mapping[int, int], path: Path) -> _Entry:
    """Turn a meta tensor into its place in the file; `sizes` are the storages' bytes by file offset."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ConfigurationError(f"{path}: {name} is not a plain dense tensor; {RESAVE}")
    spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
    span = _span(spec.shape, tensor.stride())
    if tensor.numel() > span:
        raise ConfigurationError(
            f"{path}: {name} is an expanded view, {tensor.numel()} elements of {span} stored; {RESAVE}"
        )
    start = int(tensor.storage_offset()) * tensor.element_size()
    storage_offset = tensor.untyped_storage()._checkpoint_offset
    if storage_offset is None:
        raise ConfigurationError(f"{path}: {name} has no data, it was saved from the meta device")
    end, size = start + span * tensor.element_size(), sizes[storage_offset]
    if end > size:
        raise FileError(f"{path} is damaged: {name} ends at byte {end} of its storage, which has {size}")
    return _Entry(spec, tensor.stride(), storage_offset + start)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided view, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
