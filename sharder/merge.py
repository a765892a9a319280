"""`python -m sharder.merge DIR -o FILE`: the whole checkpoint out of a shard set, bit for bit.

A `.safetensors` file is written tensor by tensor and needs memory for the largest one; a `.pt` file needs memory for
all, because `torch.save` takes them at once. The tokenizer's files and, where FILE cannot hold it, config.json are put
beside it, where the sharder looks for them.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.shards.checksum import tensor_bytes
from mpi_tp.shards.reader import ShardSet
from sharder.join import Joiner, open_joiner
from sharder.program import megabytes, progress, run_program

# The names of dtypes in a safetensors header.
SAFETENSORS_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


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
    temporary = output.with_name(f".{output.name}.incomplete")
    try:
        _check_companions(output, companions)
        with open_joiner(shards) as joiner, temporary.open("wb") as file:
            writers[output.suffix](joiner, file)
            os.fsync(file.fileno())
        for name, content in companions.items():
            (output.parent / name).write_bytes(content)
        temporary.replace(output)
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _companions(shards: ShardSet, with_config: bool) -> dict[str, bytes]:
    """Return the files that go beside the checkpoint."""
    folder = shards.open_tokenizer()
    files = {entry.name: (folder / entry.name).read_bytes() for entry in shards.manifest.tokenizer} if folder else {}
    if with_config:
        files["config.json"] = (json.dumps(shards.config, indent=2) + "\n").encode()
    return files


def _check_companions(output: Path, companions: Mapping[str, bytes]) -> None:
    for name, content in companions.items():
        path = output.parent / name
        if path.exists() and path.read_bytes() != content:
            raise ConfigurationError(f"{path} belongs to another model: choose another folder for {output.name}")


def _write_safetensors(joiner: Joiner, file: BinaryIO) -> None:
    """Write the header, which follows from the manifest, then one tensor after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    entries = joiner.shards.manifest.tensors.values()
    for entry in entries:
        end = position + entry.num_bytes
        shape = list(entry.planned.shape)
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    with progress(position, "merging") as bar:
        for entry in entries:
            file.write(tensor_bytes(joiner.join(entry)))
            bar.update(entry.num_bytes)


def _write_pt(joiner: Joiner, file: BinaryIO) -> None:
    entries = joiner.shards.manifest.tensors.values()
    tensors: dict[str, torch.Tensor] = {}
    with progress(sum(entry.num_bytes for entry in entries), "merging") as bar:
        for entry in entries:
            tensors[entry.name] = joiner.join(entry)
            bar.update(entry.num_bytes)
    try:
        torch.save({"model": tensors, "config": dict(joiner.shards.config)}, file)
    except RuntimeError as error:
        # torch reports a full disk by its own words; the system's are the ones it stumbled over.
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error


if __name__ == "__main__":
    sys.exit(run_program(main))
