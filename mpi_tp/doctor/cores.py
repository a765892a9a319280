"""Rows about the host's cores and shared memory: what the ranks of one host have to share."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mpi_tp.devices import rank_names
from mpi_tp.doctor.panel import Check
from mpi_tp.doctor.rows import Row, ok, warning

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_BYTES = 32 << 20
"""What a rank may take of it: MPI's and NCCL's buffers, and the all-gather's own."""


@dataclass(frozen=True)
class Cores:
    """The cores that a rank may use, how many its host has, and the threads that it computes on."""

    allowed: frozenset[int]
    on_host: int
    threads: int


def find_cores() -> Cores:
    """Return this rank's."""
    return Cores(frozenset(os.sched_getaffinity(0)), os.cpu_count() or 1, torch.get_num_threads())


def binding_check(hosts: Sequence[str]) -> Check[Cores]:
    """That a launcher has not bound several ranks to the same few cores; `hosts` are the ranks'."""
    return Check("core binding", find_cores, lambda by_rank: judge_binding(hosts, by_rank))


def judge_binding(hosts: Sequence[str], by_rank: Sequence[Cores]) -> Row:
    """Find ranks that are bound to fewer cores than they are, on a host that has more."""
    groups: dict[tuple[str, frozenset[int]], list[int]] = {}
    for rank, cores in enumerate(by_rank):
        groups.setdefault((hosts[rank], cores.allowed), []).append(rank)
    for (host, allowed), ranks in groups.items():
        on_host = by_rank[ranks[0]].on_host
        if len(allowed) < min(len(ranks), on_host):
            return warning(
                f"{rank_names(ranks)} on {host} are all bound to core {_spans(allowed)} of {on_host}: start with "
                "mpirun --bind-to none, or srun --cpu-bind=none, or give each --cpus-per-task"
            )
    shared = any(len(ranks) > 1 for ranks in groups.values())
    return ok("ranks share cores, as many as they are or more" if shared else "each rank has cores of its own")


def threads_check(hosts: Sequence[str]) -> Check[Cores]:
    """That the ranks of a host do not compute on more threads than it gives them cores."""
    return Check("threads", find_cores, lambda by_rank: judge_threads(hosts, by_rank))


def judge_threads(hosts: Sequence[str], by_rank: Sequence[Cores]) -> Row:
    """Compare threads and cores, host by host."""
    for host, ranks in _ranks_of(hosts):
        cores = len(frozenset().union(*(by_rank[rank].allowed for rank in ranks)))
        threads = sum(by_rank[rank].threads for rank in ranks)
        if threads <= cores:
            continue
        found = f"{len(ranks)} rank(s) on {host} compute on {threads} threads and have {cores} core(s)"
        advice = f"set OMP_NUM_THREADS={cores // len(ranks)}" if cores >= len(ranks) else "start fewer ranks there"
        return warning(f"{found}: {advice}")
    each = sorted({cores.threads for cores in by_rank})
    return ok(f"{' or '.join(map(str, each))} a rank, no more than there are cores")


def shared_memory_check(hosts: Sequence[str]) -> Check[int]:
    """That /dev/shm has room for messages between ranks of a host."""
    return Check("shared memory", find_shared_memory, lambda by_rank: judge_shared_memory(hosts, by_rank))


def find_shared_memory() -> int:
    """Return the bytes that are free."""
    room = os.statvfs(SHARED_MEMORY)
    return room.f_bavail * room.f_frsize


def judge_shared_memory(hosts: Sequence[str], by_rank: Sequence[int]) -> Row:
    """Compare with what the ranks of each host may need."""
    for host, ranks in _ranks_of(hosts):
        needed, free = len(ranks) * SHARED_MEMORY_BYTES, min(by_rank[rank] for rank in ranks)
        if len(ranks) > 1 and free < needed:
            return warning(
                f"{SHARED_MEMORY} of {host} has {free >> 20} MiB free for {len(ranks)} ranks, which may need "
                f"{needed >> 20}: remove what killed jobs have left there, or start the container with --shm-size=1g"
            )
    return ok(f"{SHARED_MEMORY} has {min(by_rank) >> 20:,} MiB free")


def _ranks_of(hosts: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    for host in dict.fromkeys(hosts):
        yield host, [rank for rank, own in enumerate(hosts) if own == host]


def _spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as "0-3,8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
