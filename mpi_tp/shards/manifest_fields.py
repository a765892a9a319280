"""The parts of a manifest.json, each read as what it must be.

A checksum says that nothing changed by accident. Whoever wrote the file on purpose could compute it too: so sizes,
names and ranges are checked here, before anything is allocated or opened by them.
"""

import math
from collections.abc import Mapping
from typing import Any

from mpi_tp.model_files import SMALL_FILES
from mpi_tp.partition.plan import STRATEGIES, PlannedTensor
from mpi_tp.partition.ranges import Range
from mpi_tp.shards.dtypes import dtype_named
from mpi_tp.shards.format import FileEntry, SetOptions, SourceEntry, TensorEntry, rank_file_name

MAX_AXES = 8
MAX_BYTES = 1 << 62
"""Of a file or a tensor; nothing larger can be addressed."""


class FieldError(ValueError):
    """A field is not what it must be."""


def whole(value: Any, name: str, maximum: int = MAX_BYTES) -> int:
    """Return a whole number from 0 to `maximum`."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise FieldError(f"{name} is {value!r:.60}: it must be a whole number from 0 to {maximum}")
    return value


def text(value: Any, name: str) -> str:
    """Return a text of printable characters."""
    if not isinstance(value, str) or not value.isprintable():
        raise FieldError(f"{name} is {value!r:.60}: it must be text")
    return value


def items(value: Any, name: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise FieldError(f"{name} is {value!r:.60}: it must be a list")
    return value


def set_options(fields: Mapping[str, Any]) -> SetOptions:
    """Return what the set was made with."""
    strategy, config, source = fields["strategy"], fields["config"], fields["source"]
    if strategy not in STRATEGIES:
        raise FieldError(f"strategy is {strategy!r:.60}: it must be one of {', '.join(STRATEGIES)}")
    if not isinstance(config, dict) or not isinstance(source, dict):
        raise FieldError("config and source must be objects")
    return SetOptions(
        ranks=len(items(fields["files"], "files")),
        strategy=strategy,
        dtype=text(fields["dtype"], "dtype"),
        config=config,
        source=SourceEntry(
            name=text(source["name"], "source.name"),
            kind=text(source["kind"], "source.kind"),
            size=whole(source["size"], "source.size"),
            header_digest=text(source["header_digest"], "source.header_digest"),
        ),
    )


def rank_files(fields: Mapping[str, Any]) -> tuple[FileEntry, ...]:
    """Return the rank files, whose names follow from their number."""
    files = tuple(_file(item, "files") for item in items(fields["files"], "files"))
    if whole(fields["ranks"], "ranks") != len(files):
        raise FieldError(f"it has {len(files)} files for {fields['ranks']} ranks")
    for rank, entry in enumerate(files):
        if entry.name != rank_file_name(rank, len(files)):
            raise FieldError(f"it names {entry.name!r:.200} where {rank_file_name(rank, len(files))} must be")
    return files


def tokenizer_files(fields: Mapping[str, Any]) -> tuple[FileEntry, ...]:
    """Return the files in tokenizer/, which are those that a model comes with and no others."""
    files = tuple(_file(item, "tokenizer") for item in items(fields["tokenizer"], "tokenizer"))
    for entry in files:
        if entry.name not in SMALL_FILES:
            raise FieldError(f"{entry.name!r:.200} is no name of a tokenizer file ({', '.join(SMALL_FILES)})")
    _refuse_twice([entry.name for entry in files])
    return files


def tensors(fields: Mapping[str, Any], ranks: int) -> dict[str, TensorEntry]:
    """Return the tensors by name, in the model's order."""
    entries = [_tensor(item, ranks) for item in items(fields["tensors"], "tensors")]
    _refuse_twice([entry.name for entry in entries])
    return {entry.name: entry for entry in entries}


def _file(item: Any, where: str) -> FileEntry:
    name = text(item["name"], f"{where}: name")
    return FileEntry(name, whole(item["size"], f"{name}: size"), text(item["digest"], f"{name}: digest"))


def _refuse_twice(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise FieldError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")


def _tensor(item: Any, ranks: int) -> TensorEntry:
    name = text(item["name"], "a tensor's name")
    shape = tuple(whole(size, f"{name}: shape") for size in items(item["shape"], f"{name}: shape"))
    if len(shape) > MAX_AXES or math.prod(max(size, 1) for size in shape) > MAX_BYTES:
        raise FieldError(f"tensor {name} has the shape {list(shape)!r:.100}, which no tensor can have")
    axis, spans = item["axis"], items(item["ranges"], f"{name}: ranges")
    if axis is not None:
        whole(axis, f"{name}: axis", len(shape) - 1)
    ranges = tuple(_ranges(by_rank, name) for by_rank in spans)
    if len(ranges) != (0 if axis is None else ranks):
        raise FieldError(f"tensor {name} has the ranges of {len(ranges)} ranks")
    if axis is not None:
        _check_cover(name, shape[axis], ranges)
    planned = PlannedTensor(name, shape, axis, ranges)
    return TensorEntry(planned, dtype_named(item["dtype"]), text(item["checksum"], f"{name}: checksum"))


def _ranges(spans: Any, name: str) -> tuple[Range, ...]:
    """Return one rank's ranges: not empty, ascending, apart."""
    ranges: list[Range] = []
    for start, stop in items(spans, f"{name}: ranges"):
        least = ranges[-1][1] if ranges else 0
        if not least <= whole(start, f"{name}: ranges") < whole(stop, f"{name}: ranges"):
            raise FieldError(f"tensor {name} has the range {[start, stop]} after index {least}")
        ranges.append((start, stop))
    return tuple(ranges)


def _check_cover(name: str, length: int, ranges: tuple[tuple[Range, ...], ...]) -> None:
    """Check that the ranks together hold every index of the axis and no other."""
    covered = 0
    for start, stop in sorted(span for spans in ranges for span in spans):
        if start > covered:
            break
        covered = max(covered, stop)
    if covered != length:
        raise FieldError(f"no rank holds index {covered} of tensor {name}, whose axis has {length}")
