"""`python -m sharder.verify DIR`: every byte of a shard set, and with `--source` its equality to the checkpoint."""

import argparse
import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mpi_tp.errors import FileError, JobError
from mpi_tp.shards.format import Manifest
from mpi_tp.shards.join import open_joiner
from mpi_tp.shards.reader import ShardSet
from sharder.program import megabytes, progress, run_program
from sharder.source import ModelSource, SourceOptions, open_source


def main(argv: Sequence[str]) -> None:
    """Verify one set, as the command line `argv` says; raises JobError."""
    parser = argparse.ArgumentParser(
        prog="python -m sharder.verify", description="Check every byte of a shard set.", allow_abbrev=False
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--source", metavar="SOURCE", type=Path, help="compare with this checkpoint, bit for bit")
    args = parser.parse_args(argv)
    manifest = verify(args.directory, args.source)
    total = sum(entry.num_bytes for entry in manifest.tensors.values())
    equal = f", equal to {args.source} bit for bit" if args.source else ""
    print(f"{args.directory}/ is whole: {len(manifest.tensors)} tensors, {megabytes(total)}{equal}")


def verify(directory: Path, source_path: Path | None = None) -> Manifest:
    """Read the whole set and return its manifest.

    Raises FileError for the first thing that is wrong, naming file, tensor and rank; ConfigurationError if the set is
    whole but the checkpoint at `source_path` is not the one that it was made from.
    """
    shards = ShardSet.open(directory)
    _check_structure(shards)
    shards.open_tokenizer()
    entries = shards.manifest.tensors.values()
    with (
        open_joiner(shards) as joiner,
        _open_same(shards, source_path) as source,
        progress(sum(entry.num_bytes for entry in entries), "verifying") as bar,
    ):
        for entry in entries:
            joiner.join(entry)
            if source is not None:
                source.check_origin(directory, entry, source.read(entry.name))
            bar.update(entry.num_bytes)
    return shards.manifest


def _check_structure(shards: ShardSet) -> None:
    """Let a process of its own open all files first: a forged one, its checksums right, can crash the HDF5 library."""
    child = multiprocessing.get_context("fork").Process(target=_open_all, args=(shards,))
    child.start()
    child.join()
    if child.exitcode and child.exitcode < 0:
        raise FileError(
            f"{shards.directory}/ is forged: the HDF5 library crashed on its structure "
            f"({signal.Signals(-child.exitcode).name}): do not use it"
        )


def _open_all(shards: ShardSet) -> None:
    with contextlib.suppress(JobError), open_joiner(shards):
        pass


def _open_same(shards: ShardSet, path: Path | None) -> AbstractContextManager[ModelSource | None]:
    """Open the checkpoint as it was read for the set."""
    if path is None:
        return nullcontext()
    return open_source(path, SourceOptions(shards.manifest.options.dtype, shards.config))


if __name__ == "__main__":
    sys.exit(run_program(main))
