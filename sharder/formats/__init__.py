"""Checkpoint readers, one file per format, and `open_checkpoint`, which tells the formats apart by content."""

import os
from functools import partial
from pathlib import Path

import torch

from mpi_tp.errors import ConfigurationError, FileError
from sharder.formats.base import CheckpointReader
from sharder.formats.gguf_file import GgufReader
from sharder.formats.huggingface import HuggingFaceReader
from sharder.formats.safetensors_file import LENGTH_BYTES, SafetensorsReader
from sharder.formats.torch_file import TorchFileReader

__all__ = ["CheckpointReader", "open_checkpoint"]

FORMS = "a Hugging Face folder, .safetensors, torch.save (zip format), .gguf"

# What people give by mistake, by the first bytes of the file.
NOT_TAKEN = {
    b"version https://git-lfs": "a Git LFS pointer instead of the file itself: run git lfs pull",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "in PyTorch's legacy, non-zip format: load and re-save it",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
}


def open_checkpoint(path: str | os.PathLike[str], quantised_dtype: torch.dtype = torch.bfloat16) -> CheckpointReader:
    """Open a checkpoint of any known format, told by its content, not by its name.

    `quantised_dtype` is what quantised tensors (GGUF) are turned into. Raises FileError if the path is missing or
    damaged, ConfigurationError if it is something else than a checkpoint.
    """
    source = Path(path)
    open_file = partial(_open_file, quantised_dtype=quantised_dtype)
    return HuggingFaceReader(source, open_file) if source.is_dir() else open_file(source)


def _open_file(source: Path, quantised_dtype: torch.dtype) -> CheckpointReader:
    """Open a single file by its first bytes."""
    start = _first_bytes(source)
    if start.startswith(b"GGUF"):
        return GgufReader(source, quantised_dtype)
    if start.startswith(b"PK\x03\x04"):
        return TorchFileReader(source)
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return SafetensorsReader(source)
    for magic, meaning in NOT_TAKEN.items():
        if start.startswith(magic):
            raise ConfigurationError(f"{source} is {meaning}; taken are {FORMS}")
    raise ConfigurationError(f"{source} is no checkpoint (it begins with {start[:8]!r}); taken are {FORMS}")


def _first_bytes(path: Path) -> bytes:
    """Return the file's first 32 bytes, or all if it is shorter."""
    try:
        with path.open("rb") as file:
            return file.read(32)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
