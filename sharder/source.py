"""A checkpoint as the model family knows it: every tensor under its canonical name, checked, and cast on reading."""

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from mpi_tp.config import ACTIVATIONS
from mpi_tp.errors import ConfigurationError, UsageError
from mpi_tp.model_files import MODEL_CONFIG_FILE, read_json
from mpi_tp.models.families import tensor_table
from mpi_tp.models.mlp import is_mlp, mlp_config
from mpi_tp.partition.plan import TensorRow
from mpi_tp.shards.checksum import tensor_bytes, tensor_checksum
from mpi_tp.shards.dtypes import DTYPES, dtype_name, dtype_named
from mpi_tp.shards.format import SourceEntry, TensorEntry, num_bytes
from sharder.formats import CheckpointReader, open_checkpoint
from sharder.names import canonical_names

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class SourceOptions:
    """How a checkpoint is read; see `sharder.Sharder`. `config` wins over the one in or beside the checkpoint."""

    dtype: str = "source"
    config: Mapping[str, Any] | None = None
    activation: str | None = None


@dataclass(frozen=True)
class ModelSource:
    """An opened checkpoint; `rows` are its tensors in the model's order, `names` how the checkpoint calls them."""

    reader: CheckpointReader
    config: Mapping[str, Any]
    rows: Sequence[TensorRow]
    names: Mapping[str, str]
    dtype: torch.dtype | None

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor of that canonical name, cast.

        Raises FileError if it cannot be read, ConfigurationError if its values do not fit the dtype asked for.
        """
        tensor = self.reader.read(self.names[name])
        if self.dtype is None or tensor.dtype == self.dtype:
            return tensor
        cast = tensor.to(self.dtype)
        infinite = cast.isinf()
        if infinite.any() and not torch.equal(infinite, tensor.isinf()):
            largest = tensor[tensor.isfinite()].abs().max().item()
            wider = "bfloat16" if self.dtype == torch.float16 else "source"
            raise ConfigurationError(
                f"tensor {name} holds {largest:g}, too large for {dtype_name(self.dtype)}: use --dtype {wider}"
            )
        return cast

    def check_origin(self, directory: Path, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Raise ConfigurationError unless the set in `directory` has its tensor `entry` from this one's `tensor`."""
        if (tensor.dtype, tensor_checksum(tensor)) != (entry.dtype, entry.checksum):
            raise ConfigurationError(
                f"{directory}/ was made from another {self.reader.path}: tensor {entry.name} differs: "
                "shard it into another folder with -o, or replace the set with --overwrite"
            )

    def read_ahead(self, names: Iterable[str]) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the tensors of those names in turn, each with its name, reading the next one meanwhile.

        Close the generator before the checkpoint if it is not exhausted: a read may be under way.
        """
        names = list(names)
        with ThreadPoolExecutor(max_workers=1) as reader:
            pending = reader.submit(self.read, names[0])
            for name, following in zip_longest(names, names[1:]):
                tensor = pending.result()
                if following:
                    pending = reader.submit(self.read, following)
                yield name, tensor

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors as `read` returns them."""
        specs = [self.reader.spec(self.names[row.name]) for row in self.rows]
        return sum(num_bytes(spec.shape, self.dtype or spec.dtype) for spec in specs)

    def fingerprint(self) -> SourceEntry:
        """Return what tells this checkpoint from another without reading its tensors."""
        path = self.reader.path.resolve()
        return SourceEntry(path.name, self.reader.kind, self.reader.source_size(), self.reader.header_digest())


@contextlib.contextmanager
def open_source(path: Path, options: SourceOptions) -> Iterator[ModelSource]:
    """Open the checkpoint at `path` and check its names, shapes and dtypes against its config.

    Raises FileError, ConfigurationError as `open_checkpoint` does, ConfigurationError for a missing, unknown or
    contradictory config or tensor, UsageError for an activation that is missing or makes no sense.
    """
    dtype = None if options.dtype == "source" else dtype_named(options.dtype)
    with open_checkpoint(path, dtype or torch.bfloat16) as reader:
        config = _json_only(_find_config(reader, options))
        rows = tensor_table(config)
        source = ModelSource(reader, config, rows, _match(reader, rows, config), dtype)
        _check_specs(source)
        _check_tied_head(source)
        yield source


def _find_config(reader: CheckpointReader, options: SourceOptions) -> Mapping[str, Any]:
    """Return the config: the one given, else inside the checkpoint, else beside it; of an MLP, from its tensors."""
    beside = reader.path.parent / MODEL_CONFIG_FILE
    config = options.config or reader.config or {}
    if not config and reader.path.is_file() and beside.exists():
        config = read_json(beside)
    shapes = {name: reader.spec(name).shape for name in reader.names()}
    if is_mlp(shapes):
        return _mlp_config(reader.path, config, shapes, options.activation)
    if options.activation:
        raise UsageError(f"--activation is for a plain stack of linear layers, and {reader.path} is none: leave it out")
    if not config:
        raise ConfigurationError(f"{reader.path} has no config.json inside or beside it: pass --model-config FILE")
    return config


def _mlp_config(
    path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], activation: str | None
) -> Mapping[str, Any]:
    if activation is None and config.get("model_type") == "mlp":
        return config
    if activation is None:
        raise UsageError(
            f"{path} is a stack of linear layers, and a state dict does not tell the activation between them: "
            f"pass --activation {'|'.join(ACTIVATIONS)}"
        )
    return mlp_config(shapes, activation)


def _json_only(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as it comes back from a JSON file."""
    try:
        return dict(json.loads(json.dumps(config)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the config holds a value that JSON cannot: {error}: pass --model-config FILE"
        ) from error


def _match(reader: CheckpointReader, rows: Sequence[TensorRow], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the checkpoint's name of every row's tensor, and of a tied head that is stored all the same."""
    known = {row.name for row in rows}
    tied = {HEAD} if config.get("tie_word_embeddings") else set()
    source_names = canonical_names(reader.names(), (known | tied).__contains__)
    names = {canonical: source for source, canonical in source_names.items()}
    for row in rows:
        if row.name not in names:
            raise ConfigurationError(
                f"{reader.path} has no tensor {row.name}, which its config asks for: does the config belong to it?"
            )
    return names


def _check_specs(source: ModelSource) -> None:
    for row in source.rows:
        spec = source.reader.spec(source.names[row.name])
        if tuple(spec.shape) != row.shape:
            raise ConfigurationError(
                f"{source.reader.path}: tensor {row.name} has shape {list(spec.shape)}, by the config it should be "
                f"{list(row.shape)}: does the config belong to it?"
            )
        if spec.dtype not in DTYPES:
            raise ConfigurationError(
                f"{source.reader.path}: tensor {row.name} is {dtype_name(spec.dtype)}; "
                f"a shard set holds {', '.join(map(dtype_name, DTYPES))}"
            )


def _check_tied_head(source: ModelSource) -> None:
    """A tied head may be stored twice; it is left out, which is right only if both are the same."""
    if HEAD not in source.names or any(row.name == HEAD for row in source.rows):
        return
    head, embedding = (source.reader.read(source.names[name]) for name in (HEAD, EMBEDDING))
    if head.dtype != embedding.dtype or tensor_bytes(head) != tensor_bytes(embedding):
        raise ConfigurationError(
            f"{source.reader.path}: {HEAD} differs from {EMBEDDING} although the config has tie_word_embeddings true: "
            "set it to false, or remove the tensor that does not belong"
        )
