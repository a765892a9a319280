"""A shard set, opened for reading; everything that is cheap to check is checked before the first tensor is read."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.partition.plan import Plan, Strategy
from mpi_tp.shards.checksum import file_entry
from mpi_tp.shards.format import MANIFEST_NAME, TOKENIZER_DIRECTORY, Manifest
from mpi_tp.shards.manifest import decode_manifest, set_id
from mpi_tp.shards.rank_file import RankFile, open_sized
from mpi_tp.shards.rank_structure import damaged

MAX_MANIFEST_BYTES = 256 << 20
"""That of a hundred ranks and ten thousand tensors has 30 MB."""


@dataclass(frozen=True)
class ShardSet:
    """A finished set: its folder and its manifest."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "ShardSet":
        """Open the set in `directory`: its manifest is whole, all its files are there and have their sizes.

        Raises FileError if not, ConfigurationError if a newer program wrote it.
        """
        folder = Path(directory)
        manifest = decode_manifest(_read_manifest(folder), folder / MANIFEST_NAME)
        shards = cls(folder, manifest)
        shards._check_files()
        return shards

    @property
    def set_id(self) -> str:
        """The set's identity, which follows from its content."""
        return self.manifest.set_id

    @property
    def model_id(self) -> str:
        """The identity of what was sharded: the same for any number of ranks and any strategy."""
        whole = dataclasses.replace(self.manifest.options, ranks=1, strategy="column_wise")
        return set_id(whole, self.manifest.tensors.values())

    @property
    def ranks(self) -> int:
        """How many ranks the set is for."""
        return self.manifest.options.ranks

    @property
    def strategy(self) -> Strategy:
        """How the tensors are split."""
        return self.manifest.options.strategy

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config under Hugging Face's names."""
        return self.manifest.options.config

    @property
    def plan(self) -> Plan:
        """Every tensor's ranges, by name."""
        return {name: entry.planned for name, entry in self.manifest.tensors.items()}

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the matrices; vectors, like those of the norms, may have another."""
        entries = self.manifest.tensors.values()
        dtype = next((entry.dtype for entry in entries if len(entry.planned.shape) == 2), None)
        if dtype is None:
            raise damaged(self.directory / MANIFEST_NAME, "it has no matrix")
        return dtype

    def check_ranks(self, size: int, tensor_parallel: int | None = None) -> None:
        """Raise ConfigurationError if `size` ranks are no whole number of replicas of the set's ranks.

        `tensor_parallel` is how many ranks a replica is wanted to have, None if nothing is said of it.
        """
        if tensor_parallel not in (None, self.ranks):
            raise ConfigurationError(
                f"{self.directory}/ holds {self.ranks} ranks but --tensor-parallel is {tensor_parallel}: use "
                f"--tensor-parallel {self.ranks}, or python -m sharder SOURCE --ranks {tensor_parallel}"
            )
        if size % self.ranks:
            or_more = " or a multiple of it" if size > self.ranks else ""
            raise ConfigurationError(
                f"{self.directory}/ holds {self.ranks} ranks but mpirun started {size}: "
                f"use -np {self.ranks}{or_more}, or python -m sharder SOURCE --ranks {size}"
            )

    def open_rank(self, rank: int) -> RankFile:
        """Open rank `rank`'s file; FileError as `RankFile` says."""
        return RankFile(self.directory, self.manifest, rank)

    def open_tokenizer(self) -> Path | None:
        """Return the folder of the tokenizer's files after checking each, None if the set has none; or FileError."""
        folder = self.directory / TOKENIZER_DIRECTORY
        for entry in self.manifest.tokenizer:
            found = file_entry(folder / entry.name)
            if found != entry:
                raise damaged(folder / entry.name, f"its checksum is {found.digest}, the manifest says {entry.digest}")
        return folder if self.manifest.tokenizer else None

    def _check_files(self) -> None:
        for entry in self.manifest.files:
            os.close(open_sized(self.directory / entry.name, entry))
        folder = self.directory / TOKENIZER_DIRECTORY
        for entry in self.manifest.tokenizer:
            os.close(open_sized(folder / entry.name, entry))
            if not (folder / entry.name).resolve().is_relative_to(self.directory.resolve()):
                raise FileError(
                    f"{folder / entry.name} is a link to a file outside the set: put a copy of the file in its place"
                )


def _read_manifest(folder: Path) -> bytes:
    try:
        with (folder / MANIFEST_NAME).open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise FileError(
            f"{folder}/ holds no finished shard set (no {MANIFEST_NAME}): make one with "
            f"python -m sharder SOURCE --ranks N -o {folder}"
        ) from error
    except OSError as error:
        raise FileError(f"{folder / MANIFEST_NAME} cannot be read: {error.strerror}") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise damaged(folder / MANIFEST_NAME, f"it has more than {MAX_MANIFEST_BYTES} bytes")
    return content
