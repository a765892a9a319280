"""Clocks that mind the device and the other ranks."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpi_tp.session import Machine

ROUNDS = 5
"""Of each measurement; the median counts."""
ROUND_SECONDS = 0.02
"""How long a round should take, at least."""
MAX_CALLS = 1000
"""In a round: more would fill the queue of a GPU."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""How much a copy moves: more than any cache holds."""
COPIES = 8
"""In a round: starting one on a GPU takes a per cent of its time."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Callable[[], object], machine: Machine) -> float:
    """Return how long a call takes, one after the other, on the slowest rank; collective."""
    once = round_seconds(call, 1, machine), round_seconds(call, 1, machine)  # the first warms up
    wanted = min(MAX_CALLS, max(1, round(ROUND_SECONDS / once[1])))
    num_calls: int = machine.comm.bcast_object(wanted)
    rounds = [round_seconds(call, num_calls, machine) / num_calls for _ in range(ROUNDS)]
    return max(machine.comm.all_gather_object(statistics.median(rounds)))


def round_seconds(call: Callable[[], object], num_calls: int, machine: Machine) -> float:
    """Return how long so many calls take on this rank, all ranks starting together; collective."""
    synchronize(machine.device)
    machine.comm.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(machine.device)
    seconds = time.perf_counter() - start
    machine.job.progress()
    return seconds


def capture(call: Callable[[], object], device: torch.device, num_calls: int = 1) -> Callable[[], None]:
    """Return what replays `num_calls` calls as one CUDA graph."""
    synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        call()  # what is made at the first call must not be part of the graph
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()
    return graph.replay


def copy_bytes_per_second(machine: Machine) -> float:
    """Return what this rank reads and writes a second in a large copy, while all ranks copy; collective."""
    source = torch.ones(COPY_BYTES[machine.device.type], dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    rounds = [round_seconds(lambda: target.copy_(source), COPIES, machine) for _ in range(ROUNDS + 1)]
    return 2 * source.nbytes * COPIES / statistics.median(rounds[1:])


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and what 99 of 100 values do not exceed, between neighbours linearly."""
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)
