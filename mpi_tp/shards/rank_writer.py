"""Writing one rank's HDF5 file; `mpi_tp.shards.format` says what is in it."""

import contextlib
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from h5py import h5d, h5p, h5s

from mpi_tp.shards.checksum import digest_outside, tensor_bytes
from mpi_tp.shards.dtypes import hdf5_type
from mpi_tp.shards.format import ALIGNMENT, FileEntry, SetOptions, TensorEntry, part_attributes, root_attributes

_NO_SET_ID = "0" * 32
_WRITE_BYTES = 1 << 20  # ext4 takes 16 MiB at once four times slower


_FLUSH_BYTES = 64 << 20  # what one file may have in the page cache before it is brought to the disk and dropped


class RankFileWriter:
    """One rank's file: `add` every tensor, then `finish`; `close` in any case. OSError when the disk refuses."""

    def __init__(self, path: Path, rank: int, options: SetOptions) -> None:
        self._path = path
        self._rank = rank
        self._extents: list[tuple[int, int]] = []
        self._num_cached = 0
        self._file = h5py.File(
            path,
            "w",
            libver=("v110", "v110"),
            locking=False,
            alignment_threshold=ALIGNMENT,
            alignment_interval=ALIGNMENT,
        )
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        for name, value in root_attributes(options, _NO_SET_ID, rank).items():
            self._file.attrs[name] = _attribute(name, value)

    def add(self, entry: TensorEntry, part: torch.Tensor, part_checksum: str) -> None:
        """Write this rank's contiguous part of the tensor that `entry` describes."""
        space = h5s.create_simple(tuple(part.shape)) if part.ndim else h5s.create(h5s.SCALAR)
        dataset = h5d.create(self._file.id, entry.name.encode(), hdf5_type(entry.dtype), space, _creation())
        for name, value in part_attributes(entry, self._rank, part_checksum).items():
            h5py.Dataset(dataset).attrs[name] = _attribute(name, value)
        if part.numel():
            self._write_elements(tensor_bytes(part), dataset.get_offset())

    def _write_elements(self, elements: memoryview, offset: int) -> None:
        """Write past HDF5, straight into the space that it has set aside."""
        self._extents.append((offset, offset + len(elements)))
        position = 0
        while position < len(elements):
            piece = elements[position : position + _WRITE_BYTES]
            position += os.pwrite(self._descriptor, piece, offset + position)
        self._num_cached += len(elements)
        if self._num_cached >= _FLUSH_BYTES:
            self._drop_cached()

    def _drop_cached(self) -> None:
        """Bring what was written to the disk and give its memory back: the next pages are the same ones again.

        So a set as large as the disk neither drives everything else out of memory nor waits for new pages of it.
        """
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._num_cached = 0

    def finish(self, set_id: str) -> FileEntry:
        """Write the identity of the set, bring all bytes to the disk and return the file's entry in the manifest."""
        self._file.attrs.modify("set_id", _attribute("set_id", set_id))
        self._close_file()
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        return FileEntry(self._path.name, size, digest_outside(self._descriptor, size, self._extents))

    def close(self) -> None:
        """Close the file, finished or not."""
        with contextlib.suppress(OSError):
            self._close_file()
        os.close(self._descriptor)

    def _close_file(self) -> None:
        try:
            self._file.close()
        except RuntimeError as error:
            # HDF5 writes the metadata when it closes a file; this is how it says that the disk is full then.
            raise OSError(str(error)) from error


def _attribute(name: str, value: Any) -> Any:
    """Return a value as it is stored: texts with a fixed length, because HDF5 guards no heap of others."""
    if isinstance(value, str):
        return np.bytes_(value.encode())
    array = np.asarray(value, np.int64)
    return array.reshape(-1, 2) if name == "ranges" else array


def _creation() -> h5p.PropDCID:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    return creation
