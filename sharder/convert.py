"""From a checkpoint to a shard set: one tensor at a time is read, cast, summed, sliced and written."""

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mpi_tp.config import MLPConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.model_files import read_json
from mpi_tp.models.families import parse_config
from mpi_tp.partition.plan import plan_shards
from mpi_tp.shards.checksum import file_entry
from mpi_tp.shards.format import MANIFEST_NAME, SetOptions
from mpi_tp.shards.reader import ShardSet
from mpi_tp.shards.writer import ShardSetWriter
from sharder import Sharder
from sharder.program import progress
from sharder.source import ModelSource, SourceOptions, open_source
from sharder.tokenizer_files import collect_tokenizer


@dataclass(frozen=True)
class Report:
    """What a run did; `found` says that the set was already there, `lacks_tokenizer` that no text can go in."""

    shards: ShardSet
    found: bool
    lacks_tokenizer: bool
    seconds: float


def convert(options: Sharder) -> Report:
    """Carry out `options`; raises as `Sharder.run` says."""
    start = time.perf_counter()
    directory = Path(options.output_dir)
    with (
        open_source(Path(options.model_path), _source_options(options)) as source,
        tempfile.TemporaryDirectory() as folder,
    ):
        parsed = parse_config(source.config)
        _check_ranks(options, parsed.max_ranks)
        tokenizer = Path(folder)
        if not isinstance(parsed, MLPConfig):
            collect_tokenizer(source.reader, Path(options.tokenizer) if options.tokenizer else None, tokenizer)
        set_options = SetOptions(
            options.device_count, options.strategy, options.dtype, source.config, source.fingerprint()
        )
        found = not options.overwrite and _is_there(directory, set_options, tokenizer)
        if not found:
            _write(directory, source, set_options, tokenizer, options.overwrite)
        elif options.verify_source:
            _compare(directory, source)
        lacks_tokenizer = not isinstance(parsed, MLPConfig) and not any(tokenizer.iterdir())
    return Report(ShardSet.open(directory), found, lacks_tokenizer, time.perf_counter() - start)


def _source_options(options: Sharder) -> SourceOptions:
    config = read_json(Path(options.model_config)) if options.model_config else None
    return SourceOptions(options.dtype, config, options.activation)


def _check_ranks(options: Sharder, max_ranks: int) -> None:
    if options.device_count > max_ranks:
        raise ConfigurationError(
            f"{options.model_path} can be split over {max_ranks} ranks at most, not {options.device_count}: "
            f"use --ranks {max_ranks} or fewer"
        )


def _is_there(directory: Path, options: SetOptions, tokenizer: Path) -> bool:
    """Say whether `directory` holds the very set that `options` and the tokenizer's files would give."""
    if not (directory / MANIFEST_NAME).exists():
        return False
    manifest = ShardSet.open(directory).manifest
    files = tuple(file_entry(path) for path in sorted(tokenizer.iterdir()))
    return manifest.options == options and manifest.tokenizer == files


def _write(directory: Path, source: ModelSource, options: SetOptions, tokenizer: Path, overwrite: bool) -> None:
    plan = plan_shards(source.rows, options.strategy, options.ranks)
    with (
        ShardSetWriter(directory, options, overwrite) as writer,
        closing(source.read_ahead(plan)) as tensors,
        progress(source.total_bytes, "sharding") as bar,
    ):
        for name, tensor in tensors:
            writer.add(plan[name], tensor)
            bar.update(tensor.nbytes)
        if any(tokenizer.iterdir()):
            writer.add_tokenizer(tokenizer)
        writer.commit()


def _compare(directory: Path, source: ModelSource) -> None:
    """Compare every tensor of the source with the set's checksums."""
    entries = ShardSet.open(directory).manifest.tensors
    with closing(source.read_ahead(entries)) as tensors, progress(source.total_bytes, "comparing") as bar:
        for name, tensor in tensors:
            source.check_origin(directory, entries[name], tensor)
            bar.update(tensor.nbytes)
