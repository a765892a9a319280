"""`python -m sharder.inspect DIR`: the plan of a shard set, and the memory that each rank needs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mpi_tp.config import ModelConfig
from mpi_tp.models.families import parse_config
from mpi_tp.partition.ranges import KeyValueHeads
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
    rows = [["rank", "file", "weights", f"KV cache per {CACHE_TOKENS:,} tokens", "together"]]
    for rank, file in enumerate(shards.manifest.files):
        weights = sum(entry.local_bytes(rank) for entry in entries)
        cache = cache_bytes(shards, rank, CACHE_TOKENS)
        rows.append([str(rank), file.name, megabytes(weights), megabytes(cache), megabytes(weights + cache)])
    return rows


def cache_bytes(shards: ShardSet, rank: int, num_tokens: int) -> int:
    """Return the bytes of rank `rank`'s keys and values of `num_tokens` tokens, in the dtype of the k projections."""
    config = parse_config(shards.config)
    if not isinstance(config, ModelConfig):
        return 0
    heads = KeyValueHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    start, stop = heads.heads(rank, shards.ranks)
    itemsize = shards.manifest.tensors["model.layers.0.self_attn.k_proj.weight"].dtype.itemsize
    return 2 * config.num_hidden_layers * (stop - start) * config.head_dim * itemsize * num_tokens


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
