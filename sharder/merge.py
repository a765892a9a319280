"""`python -m sharder.merge DIR -o FILE`: the whole checkpoint out of a shard set, bit for bit.

A `.safetensors` file is written tensor by tensor and needs memory for the largest one; a `.pt` file needs memory for
all, because `torch.save` takes them at once. The tokenizer's files and, where FILE cannot hold it, config.json are put
beside it, where the sharder looks for them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from mpi_tp.atomic import replacing, write_errors
from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.model_files import MODEL_CONFIG_FILE
from mpi_tp.shards.join import Joiner, open_joiner
from mpi_tp.shards.reader import ShardSet
from sharder.formats.base import TensorSpec
from sharder.formats.safetensors_file import write_safetensors
from sharder.program import megabytes, progress, run_program


def main(argv: Sequence[str]) -> None:
    """Merge one set, as the command line `argv` says; raises JobError."""
    parser = argparse.ArgumentParser(
        prog="python -m sharder.merge", description="Make one checkpoint of a shard set.", allow_abbrev=False
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="a .safetensors or .pt file")
    args = parser.parse_args(argv)
    merge(args.directory, args.output)
    print(f"{args.output}: {megabytes(args.output.stat().st_size)}")


def merge(directory: Path, output: Path) -> None:
    """Write the whole checkpoint to `output`, complete or not at all, with its config and tokenizer.

    Raises UsageError for another ending than .safetensors or .pt, ConfigurationError if another model's config or
    tokenizer lies where this one's goes, FileError for a damaged set or if the disk refuses.
    """
    writers = {".safetensors": _write_safetensors, ".pt": _write_pt}
    if output.suffix not in writers:
        raise UsageError(f"{output}: the name must end with .safetensors or .pt")
    shards = ShardSet.open(directory)
    companions = _companions(shards, with_config=output.suffix == ".safetensors")
    _check_companions(output, companions)
    with open_joiner(shards) as joiner, replacing(output) as file:
        with write_errors(output):
            writers[output.suffix](joiner, file)
        for name, content in companions.items():
            with replacing(output.parent / name) as companion, write_errors(output.parent / name):
                companion.write(content)


def _companions(shards: ShardSet, with_config: bool) -> dict[str, bytes]:
    """Return the files that go beside the checkpoint."""
    folder = shards.open_tokenizer()
    files = {entry.name: _read_bytes(folder / entry.name) for entry in shards.manifest.tokenizer} if folder else {}
    if with_config:
        files[MODEL_CONFIG_FILE] = (json.dumps(shards.config, indent=2) + "\n").encode()
    return files


def _check_companions(output: Path, companions: Mapping[str, bytes]) -> None:
    for name, content in companions.items():
        path = output.parent / name
        if path.exists() and _read_bytes(path) != content:
            raise ConfigurationError(f"{path} belongs to another model: choose another folder for {output.name}")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


def _write_safetensors(joiner: Joiner, file: BinaryIO) -> None:
    entries = joiner.shards.manifest.tensors
    specs = {name: TensorSpec(entry.dtype, entry.planned.shape) for name, entry in entries.items()}
    write_safetensors(file, specs, (tensor for _, tensor in _joined(joiner)))


def _write_pt(joiner: Joiner, file: BinaryIO) -> None:
    try:
        torch.save({"model": dict(_joined(joiner)), "config": dict(joiner.shards.config)}, file)
    except RuntimeError as error:
        # torch reports a full disk by its own words; the system's are the ones it stumbled over.
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error


def _joined(joiner: Joiner) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors, each with its name, in the manifest's order."""
    entries = joiner.shards.manifest.tensors.values()
    with progress(sum(entry.num_bytes for entry in entries), "merging") as bar:
        for entry in entries:
            yield entry.name, joiner.join(entry)
            bar.update(entry.num_bytes)


if __name__ == "__main__":
    sys.exit(run_program(main))
