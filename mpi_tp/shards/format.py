"""The shard set, format version 1: what is in its files, byte for byte.

    shards/
      manifest.json               written last: a folder without it is no set
      rank-00000-of-00004.h5 …    one file a rank
      tokenizer/                  the model's small files (mpi_tp.model_files.SMALL_FILES); may be missing

All numbers are little-endian, all texts UTF-8, all checksums xxh3-128 as 32 lower-case hexadecimal digits. The
checksum of a tensor is that of its elements in C order. Nothing depends on time or host: the same source and options
give the same bytes.

manifest.json
    One JSON object. Its first line is `{"digest": "…",` with the checksum of all bytes after that line, so that a
    change of any byte shows; this line is the same in every version. Then:

    format          "mpi-tp shards"
    version         1
    set_id          checksum of config, strategy, ranks and every tensor's name, dtype, shape and checksum
    created_by      the program and its version
    ranks           how many rank files there are
    strategy        "column_wise" or "paired"
    dtype           what the tensors were cast to, or "source"
    config          the model's config under Hugging Face's names
    source          {name, kind, size, header_digest} of the checkpoint
    tensors         [{name, dtype, shape, axis, ranges, checksum}] of the whole tensors, in the model's order. `ranges`
                    has an entry a rank: its half-open [start, stop] pairs along `axis`, ascending. With `axis` null
                    every rank holds the tensor whole and `ranges` is empty. Ranks may share indices
    files           [{name, size, digest}] of the rank files, in rank order
    tokenizer       [{name, size, digest}] of the files in tokenizer/; digest is the checksum of the
                    file, none of which is a link out of the set

rank-RRRRR-of-NNNNN.h5
    An HDF5 file (library version 1.10 or newer). Attributes of the root group: format, version, set_id, rank, ranks,
    strategy, dtype, config (JSON). In the root group one dataset a tensor, under the tensor's name, and nothing else:
    no links but hard ones, no external storage. The rank's ranges of the tensor follow one another along its axis.

    Datasets are contiguous, without filters, their space allocated at creation; those of 4 KiB or more start at a
    multiple of 4 KiB. A dataset without elements has no space. The HDF5 type is `mpi_tp.shards.dtypes`'. Attributes:

    global_shape    int64[number of axes]: the whole tensor's shape
    axis            int64: the axis that is split, -1 for a whole tensor
    ranges          int64[n, 2]: this rank's ranges
    torch_dtype     text
    xxh3_128        text: the checksum of this part

    The digest of a rank file is the checksum of its bytes outside the datasets' elements, in file order. Those bytes
    hold the parts' checksums, so the digest stands for every byte of the file.

History: 1, the first.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpi_tp.partition.plan import PlannedTensor, Strategy
from mpi_tp.partition.ranges import Range
from mpi_tp.shards.dtypes import dtype_name

FORMAT_NAME = "mpi-tp shards"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
ALIGNMENT = 4096
"""Bytes: datasets at least this large start at a multiple of it."""


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor as the manifest describes it: its plan, dtype and the checksum of all its elements."""

    planned: PlannedTensor
    dtype: torch.dtype
    checksum: str

    @property
    def name(self) -> str:
        """The tensor's canonical name."""
        return self.planned.name

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return num_bytes(self.planned.shape, self.dtype)

    def local_ranges(self, rank: int) -> tuple[Range, ...]:
        """Return rank `rank`'s ranges along the axis; none for a tensor that every rank holds whole."""
        return () if self.planned.axis is None else self.planned.ranges[rank]

    def local_bytes(self, rank: int) -> int:
        """Return the bytes of rank `rank`'s part."""
        return num_bytes(self.planned.local_shape(rank), self.dtype)


@dataclass(frozen=True)
class FileEntry:
    """A file of the set: its name, size in bytes and digest."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class SourceEntry:
    """The fingerprint of the checkpoint that a set was made from; `size` in bytes. Its name does not count."""

    name: str = field(compare=False)
    kind: str
    size: int
    header_digest: str


@dataclass(frozen=True)
class SetOptions:
    """What a set is made with: everything that does not come from the tensors themselves."""

    ranks: int
    strategy: Strategy
    dtype: str
    config: Mapping[str, Any]
    source: SourceEntry


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says; `tensors` by name in the model's order, `files` in rank order."""

    set_id: str
    created_by: str
    options: SetOptions
    tensors: Mapping[str, TensorEntry]
    files: Sequence[FileEntry]
    tokenizer: Sequence[FileEntry]


@dataclass(frozen=True)
class PartEntry:
    """One tensor in one rank's file: `shape` is the part's, `offset` its first byte in the file (0 without bytes)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the part."""
        return num_bytes(self.shape, self.dtype)


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def rank_file_name(rank: int, ranks: int) -> str:
    """Return the name of rank `rank`'s file in a set of `ranks`."""
    return f"rank-{rank:05d}-of-{ranks:05d}.h5"


def root_attributes(options: SetOptions, set_id: str, rank: int) -> dict[str, Any]:
    """Return the attributes of rank `rank`'s file, as texts and numbers."""
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "set_id": set_id,
        "rank": rank,
        "ranks": options.ranks,
        "strategy": options.strategy,
        "dtype": options.dtype,
        "config": json.dumps(options.config),
    }


def part_attributes(entry: TensorEntry, rank: int, part_checksum: str) -> dict[str, Any]:
    """Return the attributes of rank `rank`'s dataset of a tensor, as texts, numbers and lists."""
    axis = entry.planned.axis
    return {
        "global_shape": list(entry.planned.shape),
        "axis": -1 if axis is None else axis,
        "ranges": [list(span) for span in entry.local_ranges(rank)],
        "torch_dtype": dtype_name(entry.dtype),
        "xxh3_128": part_checksum,
    }
