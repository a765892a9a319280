"""Small shard sets, straight through the writer, and how to damage them in a way that no digest betrays."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import torch

from mpi_tp.partition.plan import REPLICATED, PlannedTensor, Strategy, TensorRow, plan_shards
from mpi_tp.partition.ranges import Blocks
from mpi_tp.shards.checksum import digest_outside
from mpi_tp.shards.format import FileEntry, Manifest, SetOptions, SourceEntry
from mpi_tp.shards.manifest import decode_manifest, encode_manifest
from mpi_tp.shards.writer import ShardSetWriter

SPLIT, WHOLE = "split.weight", "whole.weight"
ROWS, COLUMNS = 65, 40


def set_options(ranks: int, strategy: Strategy = "column_wise", config: Mapping[str, Any] | None = None) -> SetOptions:
    source = SourceEntry("source.pt", "torch", 1, "0" * 32)
    return SetOptions(ranks, strategy, "source", config or {"model_type": "test"}, source)


def small_plan(ranks: int) -> dict[str, PlannedTensor]:
    """A tensor of 65 rows split over the ranks and one that all hold."""
    rows = Blocks(ROWS)
    table = [
        TensorRow(SPLIT, (ROWS, COLUMNS), (0, rows), (0, rows)),
        TensorRow(WHOLE, (COLUMNS,), REPLICATED, REPLICATED),
    ]
    return plan_shards(table, "column_wise", ranks)


def small_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        SPLIT: torch.randn(ROWS, COLUMNS, generator=generator).to(dtype),
        WHOLE: torch.randn(COLUMNS, generator=generator).to(dtype),
    }


def write_set(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    plan: Mapping[str, PlannedTensor],
    options: SetOptions,
    overwrite: bool = False,
) -> Manifest:
    with ShardSetWriter(directory, options, overwrite) as writer:
        for name, planned in plan.items():
            writer.add(planned, tensors[name])
        return writer.commit()


def write_small(directory: Path, ranks: int = 2, seed: int = 0, overwrite: bool = False) -> Manifest:
    return write_set(directory, small_tensors(seed=seed), small_plan(ranks), set_options(ranks), overwrite)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Change the bits of `mask` in the byte at `offset`."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@contextlib.contextmanager
def forged(directory: Path, rank: int) -> Iterator[h5py.File]:
    """Open a rank file for any change; afterwards the manifest has its new size and digest."""
    manifest = read_manifest(directory)
    path = directory / manifest.files[rank].name
    with h5py.File(path, "r+", locking=False) as file:
        yield file
    files = list(manifest.files)
    files[rank] = FileEntry(path.name, path.stat().st_size, _digest(path))
    write_manifest(directory, dataclasses.replace(manifest, files=files))


def _digest(path: Path) -> str:
    extents = []
    with h5py.File(path, "r", locking=False) as file:
        linked = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        for dataset in (file[name] for name in linked):
            offset = dataset.id.get_offset() if isinstance(dataset, h5py.Dataset) else None
            if offset is not None:
                extents.append((offset, offset + dataset.id.get_storage_size()))
    descriptor = os.open(path, os.O_RDONLY)
    digest = digest_outside(descriptor, path.stat().st_size, extents)
    os.close(descriptor)
    return digest


def read_manifest(directory: Path) -> Manifest:
    path = directory / "manifest.json"
    return decode_manifest(path.read_bytes(), path)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
