"""Loading a shard set onto the devices, against a raw sequential read of the same files."""

import os
import statistics
from collections.abc import Callable
from pathlib import Path

from mpi_tp.bench.chart import Chart
from mpi_tp.bench.report import Row
from mpi_tp.bench.timing import round_seconds
from mpi_tp.loading import load_model
from mpi_tp.session import Machine
from mpi_tp.shards.reader import ShardSet

CHART = Chart("round", ("load_gb_s", "raw_gb_s"))

BUFFER_BYTES = 2**24


def measure(machine: Machine, shards: ShardSet, num_rounds: int) -> list[Row]:
    """Return a row a round and one with their medians; collective. GB/s are those of all ranks together.

    The files lie in the page cache, as far as it holds them: both ways read them once before the clock runs.
    """
    path = shards.directory / shards.manifest.files[machine.comm.rank].name
    buffer = bytearray(BUFFER_BYTES)
    kept: list[object] = []  # so that no clock runs while a model is taken down

    def load() -> None:
        with shards.open_rank(machine.comm.rank) as rank_file:
            kept.append(
                load_model(shards, rank_file, machine.comm, machine.kernels, machine.device, machine.job.progress)
            )

    def rate(call: Callable[[], object]) -> float:
        seconds = round_seconds(call, 1, machine)
        kept.clear()
        total = machine.replicas.count * sum(entry.size for entry in shards.manifest.files)
        return total / max(machine.job.world.allgather(seconds)) / 1e9

    ways: dict[str, Callable[[], object]] = {"load_gb_s": load, "raw_gb_s": lambda: read_raw(path, buffer)}
    with machine.job.phase("loading"):
        rounds = [
            {name: rate(ways[name]) for name in (reversed(ways) if number % 2 else ways)}
            for number in range(num_rounds + 1)
        ]
    return with_medians(rounds[1:])


def with_medians(rounds: list[dict[str, float]]) -> list[Row]:
    """Return the rows of the rounds, then that of their medians; a ratio is taken within its round."""
    names = ("load_gb_s", "raw_gb_s")
    rows: list[Row] = [
        {"round": str(number), **{name: one[name] for name in names}, "ratio": one["load_gb_s"] / one["raw_gb_s"]}
        for number, one in enumerate(rounds, start=1)
    ]
    medians = {name: statistics.median(row[name] for row in rows) for name in (*names, "ratio")}
    return [*rows, {"round": "median", **medians}]


def read_raw(path: Path, buffer: bytearray) -> int:
    """Read a file from end to end into one buffer, again and again; return its bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    position = 0
    while count := os.preadv(descriptor, [buffer], position):
        position += count
    os.close(descriptor)
    return position
