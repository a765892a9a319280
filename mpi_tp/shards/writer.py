"""Writing a whole shard set, tensor by tensor."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

import mpi_tp
from mpi_tp.errors import FileError
from mpi_tp.partition.plan import PlannedTensor
from mpi_tp.shards.checksum import file_entry, tensor_checksum
from mpi_tp.shards.format import (
    MANIFEST_NAME,
    TOKENIZER_DIRECTORY,
    FileEntry,
    Manifest,
    SetOptions,
    TensorEntry,
    rank_file_name,
)
from mpi_tp.shards.manifest import encode_manifest, set_id
from mpi_tp.shards.rank_writer import RankFileWriter
from mpi_tp.shards.slicing import take_part
from mpi_tp.shards.staging import Staging, sync_directory


class ShardSetWriter:
    """Writes a set into `directory`: `add` every tensor, then `commit`; use it in a `with` statement.

    Until `commit` returns, what was in the folder stays as it is; leaving the `with` statement without it removes all
    that was written. Raises ConfigurationError if the folder holds a set and `overwrite` is off, FileError if it cannot
    be written.
    """

    def __init__(self, directory: Path, options: SetOptions, overwrite: bool = False) -> None:
        self._directory = directory
        self._options = options
        self._tensors: dict[str, TensorEntry] = {}
        self._tokenizer: list[FileEntry] = []
        self._files: list[RankFileWriter] = []
        with self._file_errors():
            self._staging = Staging(directory, overwrite)

    def __enter__(self) -> "ShardSetWriter":
        try:
            with self._file_errors():
                self._open_files()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, planned: PlannedTensor, tensor: torch.Tensor) -> None:
        """Write each rank's part of a whole CPU `tensor`, which has the shape that `planned` says."""
        assert tuple(tensor.shape) == planned.shape, f"{planned.name}: {tuple(tensor.shape)} != {planned.shape}"
        tensor = tensor.contiguous()
        entry = TensorEntry(planned, tensor.dtype, tensor_checksum(tensor))
        self._tensors[entry.name] = entry
        for rank, file in enumerate(self._files):
            if planned.axis is None:
                part, part_checksum = tensor, entry.checksum
            else:
                part = take_part(tensor, planned.axis, planned.ranges[rank])
                part_checksum = tensor_checksum(part)
            with self._file_errors():
                file.add(entry, part, part_checksum)

    def add_tokenizer(self, source: Path) -> None:
        """Copy every file of the folder `source` into the set."""
        target = self._staging.path / TOKENIZER_DIRECTORY
        with self._file_errors():
            target.mkdir()
            for path in sorted(source.iterdir()):
                copy = Path(shutil.copyfile(path, target / path.name))
                _sync_file(copy)
                self._tokenizer.append(file_entry(copy))
            sync_directory(target)

    def commit(self) -> Manifest:
        """Finish all files, put them in their place and return the manifest."""
        identity = set_id(self._options, self._tensors.values())
        with self._file_errors():
            manifest = Manifest(
                set_id=identity,
                created_by=f"mpi-tp {mpi_tp.__version__}",
                options=self._options,
                tensors=self._tensors,
                files=[file.finish(identity) for file in self._files],
                tokenizer=self._tokenizer,
            )
            staged = self._staging.path / MANIFEST_NAME
            staged.write_bytes(encode_manifest(manifest))
            _sync_file(staged)
            self._staging.commit()
        return manifest

    def _open_files(self) -> None:
        ranks = self._options.ranks
        for rank in range(ranks):
            path = self._staging.path / rank_file_name(rank, ranks)
            self._files.append(RankFileWriter(path, rank, self._options))

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._staging.close()

    @contextlib.contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Turn what the disk refuses into a FileError."""
        try:
            yield
        except OSError as error:
            raise FileError(f"cannot write {self._directory}/: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """Return one line: HDF5 puts the system's error number into a page of text."""
    return os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
