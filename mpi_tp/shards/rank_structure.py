"""The structure of one rank's HDF5 file, compared with the manifest piece by piece.

HDF5 follows links, external files and virtual datasets by itself, and reserves what a header asks for. So what a thing
is gets looked at before it is opened or read, and elements are never read here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

from mpi_tp.errors import FileError
from mpi_tp.shards.dtypes import hdf5_type
from mpi_tp.shards.format import Manifest, PartEntry, TensorEntry, part_attributes, root_attributes

MAX_ATTRIBUTE_BYTES = 16 << 20
"""The longest attribute is the model's config."""


def read_structure(path: Path, size: int, manifest: Manifest, rank: int) -> dict[str, PartEntry]:
    """Return what rank `rank`'s file of `size` bytes holds, by name in the manifest's order.

    Raises FileError if it cannot be read or holds anything that the manifest does not describe.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_root(path, h5g.open(file.id, b"/"), manifest, rank)
            parts = {
                tensor.name: _read_part(path, h5d.open(file.id, tensor.name.encode()), tensor, rank)
                for tensor in manifest.tensors.values()
            }
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise damaged(path, f"HDF5 cannot read it ({reason})") from error
    _check_extents(path, parts, size)
    return parts


def damaged(path: Path, what: str) -> FileError:
    """Return the error for a file of a set that is not as it was written."""
    return FileError(f"{path} is damaged: {what}: shard the source again")


def _check_root(path: Path, root: h5g.GroupID, manifest: Manifest, rank: int) -> None:
    attributes = _read_attributes(root)
    if attributes.get("set_id") != manifest.set_id:
        raise FileError(
            f"{path} belongs to shard set {attributes.get('set_id')}, manifest.json describes {manifest.set_id}: "
            "files of two sets are mixed: shard the source again"
        )
    _check_equal(path, "", attributes, root_attributes(manifest.options, manifest.set_id, rank))
    names = {_text(name) for name in root}
    for name in sorted(names - manifest.tensors.keys()):
        raise damaged(path, f"it holds {name}, which the manifest does not know")
    for name in manifest.tensors:
        if name not in names:
            raise damaged(path, f"tensor {name} of rank {rank} is missing")
        if root.links.get_info(name.encode()).type != h5l.TYPE_HARD:
            raise damaged(path, f"tensor {name} of rank {rank} is a link to somewhere else")
        if h5o.get_info(root, name.encode()).type != h5o.TYPE_DATASET:
            raise damaged(path, f"tensor {name} of rank {rank} is no dataset")


def _read_part(path: Path, dataset: h5d.DatasetID, tensor: TensorEntry, rank: int) -> PartEntry:
    """Return the part of `tensor` that `dataset` holds, after comparing everything but its elements."""
    where = f"tensor {tensor.name} of rank {rank}: "
    creation = dataset.get_create_plist()
    storage = {"layout": creation.get_layout(), "filters": creation.get_nfilters()}
    # Asked for its shape, a virtual dataset opens the files that it is put together from.
    _check_equal(path, where, storage, {"layout": h5d.CONTIGUOUS, "filters": 0})
    attributes = _read_attributes(dataset)
    checksum = str(attributes.get("xxh3_128"))
    shape = tensor.planned.local_shape(rank)
    found = {
        **attributes,
        "external files": creation.get_external_count(),
        "shape": dataset.get_space().get_simple_extent_dims(),
        "stored type is the dtype's": dataset.get_type() == hdf5_type(tensor.dtype),
    }
    expected = {
        **part_attributes(tensor, rank, checksum),
        "external files": 0,
        "shape": shape,
        "stored type is the dtype's": True,
    }
    _check_equal(path, where, found, expected)
    return PartEntry(tensor.name, tensor.dtype, shape, checksum, dataset.get_offset() or 0)


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


def _read_attributes(item: Any) -> dict[str, Any]:
    """Return an HDF5 object's attributes as texts, numbers and lists."""
    attributes = [h5a.open(item, index=index) for index in range(h5a.get_num_attrs(item))]
    return {_text(attribute.name): _read_attribute(attribute) for attribute in attributes}


def _read_attribute(attribute: h5a.AttrID) -> Any:
    """Return the value if it is of a type and size that we write; for any other, words that equal no value."""
    kind, space = attribute.get_type(), attribute.get_space()
    num_bytes = space.get_simple_extent_npoints() * kind.get_size()
    is_text = kind.get_class() == h5t.STRING and not kind.is_variable_str() and space.get_simple_extent_ndims() == 0
    is_empty = space.get_simple_extent_type() == h5s.NULL
    if is_empty or num_bytes > MAX_ATTRIBUTE_BYTES or not (is_text or kind == h5t.STD_I64LE):
        return f"({num_bytes} bytes of another type)"
    value = np.empty(space.get_simple_extent_dims(), f"S{kind.get_size()}" if is_text else np.int64)
    attribute.read(value)
    return _text(value.item()) if is_text else value.tolist()


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
