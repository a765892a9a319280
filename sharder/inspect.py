"""`python -m sharder.inspect DIR`: the plan of a shard set, and the memory that each rank needs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.models.cache_size import bytes_per_token
from mpi_tp.models.families import parse_config
from mpi_tp.shards.dtypes import dtype_name
from mpi_tp.shards.format import TensorEntry
from mpi_tp.shards.reader import ShardSet
from sharder.program import balance, megabytes, run_program

CACHE_TOKENS = 1000


def main(argv: Sequence[str]) -> None:
    """Print the plan of one set, as the command line `argv` says; raises JobError."""
    parser = argparse.ArgumentParser(
        prog="python -m sharder.inspect", description="Show what each rank of a shard set holds.", allow_abbrev=False
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    print("\n".join(describe(ShardSet.open(parser.parse_args(argv).directory))))


def describe(shards: ShardSet) -> list[str]:
    """Return the lines: the set, its tensors with their ranges, the ranks with their bytes."""
    options = shards.manifest.options
    head = [
        f"{shards.directory}/: set {shards.set_id}, {shards.config['model_type']}, {shards.ranks} ranks, "
        f"{shards.strategy}, dtype {options.dtype}, from {options.source.name} ({options.source.kind})"
    ]
    entries = list(shards.manifest.tensors.values())
    rows = [["tensor", "dtype", "shape", "axis", *(f"rank {rank} (bytes)" for rank in range(shards.ranks))]]
    rows += [_tensor_row(entry, shards.ranks) for entry in entries]
    return [*head, "", *_table(rows), "", *_table(_rank_rows(shards, entries)), "", _balance_line(shards, entries)]


def _tensor_row(entry: TensorEntry, ranks: int) -> list[str]:
    axis = entry.planned.axis
    shape = " x ".join(map(str, entry.planned.shape))
    parts = [f"{_spans(entry, rank)} ({entry.local_bytes(rank):,})" for rank in range(ranks)]
    return [entry.name, dtype_name(entry.dtype), shape, "-" if axis is None else str(axis), *parts]


def _spans(entry: TensorEntry, rank: int) -> str:
    if entry.planned.axis is None:
        return "whole"
    return ",".join(f"{start}:{stop}" for start, stop in entry.local_ranges(rank)) or "none"


def _rank_rows(shards: ShardSet, entries: Sequence[TensorEntry]) -> list[list[str]]:
    """Return weights and cache a rank: by default the cache is float32 on CPUs, as the weights on GPUs."""
    dtypes = {"CPU": torch.float32, "GPU": shards.weights_dtype}
    caches = [f"KV cache per {CACHE_TOKENS:,} tokens, {place} ({dtype_name(dtype)})" for place, dtype in dtypes.items()]
    rows = [["rank", "file", "weights", *caches]]
    for rank, file in enumerate(shards.manifest.files):
        weights = sum(entry.local_bytes(rank) for entry in entries)
        sizes = [cache_bytes(shards, rank, CACHE_TOKENS, dtype) for dtype in dtypes.values()]
        together = [f"{megabytes(size)} ({megabytes(weights + size)} together)" for size in sizes]
        rows.append([str(rank), file.name, megabytes(weights), *together])
    return rows


def cache_bytes(shards: ShardSet, rank: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of rank `rank`'s keys and values of `num_tokens` tokens; linear layers have none."""
    config = parse_config(shards.config)
    if not isinstance(config, ModelConfig):
        return 0
    return num_tokens * bytes_per_token(config, rank, shards.ranks, dtype)


def _balance_line(shards: ShardSet, entries: Sequence[TensorEntry]) -> str:
    by_rank = [sum(entry.local_bytes(rank) for entry in entries) for rank in range(shards.ranks)]
    whole = sum(entry.num_bytes for entry in entries)
    return (
        f"balance {balance(by_rank)} (largest rank over mean); all ranks hold {megabytes(sum(by_rank))}, "
        f"the model has {megabytes(whole)}"
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(run_program(main))
