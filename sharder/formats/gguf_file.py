"""Reader of a `.gguf` file under Hugging Face names: blocks dequantised, llama.cpp's order of q and k rows undone."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.shards.checksum import tensor_bytes
from sharder.formats.base import SingleFile, TensorSpec, pread_into
from sharder.formats.gguf_header import GgufTensor, parse_header
from sharder.formats.gguf_translation import (
    ARCHITECTURES,
    ROPE_FACTORS,
    canonical_name,
    interleaved_heads,
    translate_config,
)

SLAB_ELEMENTS = 1 << 20  # dequantising needs several float32 copies of a slab

STORED_DTYPES = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F64: torch.float64,
}


class GgufReader(SingleFile):
    """Tensors of a GGUF file under canonical Hugging Face names; quantised ones come as `quantised_dtype`.

    `metadata` holds everything else that the file says, the tokenizer included. Raises FileError for a damaged
    file, ConfigurationError for an architecture, a tensor or a block type that is not known.
    """

    kind = "gguf"

    def __init__(self, path: Path, quantised_dtype: torch.dtype = torch.bfloat16) -> None:
        self.quantised_dtype = quantised_dtype
        super().__init__(path)

    def _parse(self) -> None:
        with open(self.fd, "rb", closefd=False) as file:
            header = parse_header(file, self.size, self.path)
        self.read_header(0, header.length, "the header")
        self.metadata = header.metadata
        _check_architecture(header.metadata, self.path)
        self._entries, self._rope_factors = _rename(header.tensors, self.path)
        self._interleaved = interleaved_heads(header.metadata, self._entries, self.path)
        _check_dequantisable([*self._entries.values(), *filter(None, [self._rope_factors])], self.path)

    def __enter__(self) -> "GgufReader":
        return self

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The metadata as a Hugging Face config. Raises ConfigurationError for what it cannot express."""
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        factors = self._read_entry(self._rope_factors).float() if self._rope_factors else None
        return translate_config(self.metadata, shapes, factors)

    def names(self) -> list[str]:
        """Canonical names of all weights."""
        return list(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of tensor `name`, dequantised."""
        entry = self._entries[name]
        return TensorSpec(STORED_DTYPES.get(entry.stored_as, self.quantised_dtype), entry.shape)

    def read(self, name: str) -> torch.Tensor:
        """Read and dequantise tensor `name`. Raises FileError."""
        tensor = self._read_entry(self._entries[name])
        if name not in self._interleaved:
            return tensor
        pairs = tensor.view(self._interleaved[name], -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def _read_entry(self, entry: GgufTensor) -> torch.Tensor:
        """Read a tensor as the file orders its rows."""
        if entry.stored_as not in STORED_DTYPES:
            return self._read_quantised(entry)
        tensor = torch.empty(entry.shape, dtype=STORED_DTYPES[entry.stored_as])
        pread_into(self.fd, tensor_bytes(tensor), entry.offset, self.path, entry.name)
        return tensor

    def _read_quantised(self, entry: GgufTensor) -> torch.Tensor:
        """Dequantise slab after slab of rows, so that float32 copies of the whole tensor never exist."""
        tensor = torch.empty(entry.shape, dtype=self.quantised_dtype)
        rows = tensor.view(-1, entry.shape[-1])
        slab_rows = max(1, SLAB_ELEMENTS // entry.shape[-1])
        for first in range(0, len(rows), slab_rows):
            slab = rows[first : first + slab_rows]
            blocks = np.empty((len(slab), entry.row_bytes), dtype=np.uint8)
            offset = entry.offset + first * entry.row_bytes
            pread_into(self.fd, blocks.reshape(-1).data, offset, self.path, entry.name)
            slab.copy_(torch.from_numpy(gguf.dequantize(blocks, entry.stored_as)))
        return tensor


def _check_architecture(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse an unknown architecture, and a part of a model."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigurationError(f"{path} has the architecture {architecture!r}; known in GGUF are {known}")
    if (count := metadata.get("split.count", 1)) not in (0, 1):
        raise ConfigurationError(f"{path} is one of {count!r:.20} parts; join them first: gguf-split --merge FIRST OUT")


def _rename(tensors: tuple[GgufTensor, ...], path: Path) -> tuple[dict[str, GgufTensor], GgufTensor | None]:
    """Return the weights by canonical name, and the rotary factors, which are no weight."""
    entries: dict[str, GgufTensor] = {}
    rope_factors = None
    for tensor in tensors:
        name = canonical_name(tensor.name)
        if tensor.name == ROPE_FACTORS:
            rope_factors = tensor
        elif name is None:
            raise ConfigurationError(f"{path}: tensor {tensor.name} is not known")
        else:
            entries[name] = tensor
    if "model.embed_tokens.weight" not in entries:
        raise FileError(f"{path} is damaged: it has no token_embd.weight")
    return entries, rope_factors


def _check_dequantisable(entries: Sequence[GgufTensor], path: Path) -> None:
    """Try one empty block of each kind before hours of work end in one that cannot be dequantised."""
    kinds = {entry.stored_as: entry.name for entry in entries}
    for stored_as, name in kinds.items():
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[stored_as][1]), dtype=np.uint8)
        try:
            if stored_as not in STORED_DTYPES:
                gguf.dequantize(block, stored_as)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"{path}: {name} is stored as {stored_as.name}, which the gguf package cannot dequantise"
            ) from error
