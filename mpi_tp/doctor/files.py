"""Rows about the shard set: that it is there, whole and for this job, and how fast it can be read."""

import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi_tp.devices import rank_names
from mpi_tp.doctor.panel import Check
from mpi_tp.doctor.rows import Row, ok, warning
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.loading import check_plan
from mpi_tp.shards.format import TensorEntry
from mpi_tp.shards.join import open_joiner
from mpi_tp.shards.reader import ShardSet

SLOWEST_RATE = 20e6
"""Bytes a second below which a rank's reading has failed."""
SAMPLE_BYTES = 1 << 30
SAMPLE_SECONDS = 5.0
SMALLEST_SAMPLE = 8 << 20
"""Bytes below which a rate says nothing."""
PATIENCE_SECONDS = 120.0
"""How long loading may take before it is worth a warning."""


def set_check(directory: Path) -> Check[str]:
    """That every rank finds the set, the same one, with all its files in their sizes."""

    def judge(set_ids: Sequence[str]) -> Row:
        other = next((rank for rank, set_id in enumerate(set_ids) if set_id != set_ids[0]), None)
        if other is not None:
            raise ConfigurationError(
                f"{directory}/ is set {set_ids[other]} for rank {other}, and {set_ids[0]} for rank 0: copy one set to "
                "all hosts"
            )
        return ok(f"{directory}/ is set {set_ids[0]} for all ranks; its files are there")

    return Check("shard set", lambda: ShardSet.open(directory).set_id, judge)


def ranks_check(shards: ShardSet, size: int) -> Check[None]:
    """That the set is for this many ranks, and split as this version's layers are."""

    def probe() -> None:
        shards.check_ranks(size)
        check_plan(shards)

    return Check("rank count", probe, lambda _: ok(f"the set is for {shards.ranks} rank(s), and {size} are there"))


def locking_check(shards: ShardSet, file: int) -> Check[str]:
    """A hint: whether the folder's file system knows locks, which HDF5 asks for unless it is told not to."""
    return Check("file locking", lambda: try_lock(shards.directory / shards.manifest.files[file].name), judge_locking)


def try_lock(path: Path) -> str:
    """Return "" if the file can be locked as HDF5 does it to read, else the reason."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another program has the file locked"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
    return ""


def judge_locking(reasons: Sequence[str]) -> Row:
    """Say who needs to know: mpi-tp reads without locks."""
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    if not failed:
        return ok("the shard files can be locked")
    return warning(
        f"{rank_names(failed)}: the shard files cannot be locked ({reasons[failed[0]]}): this program needs no lock; "
        "for h5dump or h5py set HDF5_USE_FILE_LOCKING=FALSE"
    )


@dataclass(frozen=True)
class Sample:
    """What a rank has read of its file, of how much, and how long that took."""

    num_bytes: int
    file_bytes: int
    seconds: float


def storage_check(shards: ShardSet, file: int) -> Check[Sample]:
    """How fast the ranks read their files, all at once, past the page cache as far as that can be had."""
    path = shards.directory / shards.manifest.files[file].name
    return Check("storage", lambda: read_sample(path, SAMPLE_BYTES, SAMPLE_SECONDS), judge_storage)


def read_sample(path: Path, most_bytes: int, most_seconds: float) -> Sample:
    """Read a file from its start. Raises FileError if that fails."""
    buffer = bytearray(16 << 20)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file_bytes, position = os.fstat(descriptor).st_size, 0
            os.fdatasync(descriptor)  # what is not on the disk yet stays in the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.monotonic()
            while position < min(file_bytes, most_bytes) and time.monotonic() - start < most_seconds:
                position += os.preadv(descriptor, [buffer], position)
            return Sample(position, file_bytes, time.monotonic() - start)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


def judge_storage(samples: Sequence[Sample]) -> Row:
    """Tell the rate and what it means for loading; the ranks read at once, so their rates add up."""
    if min(sample.num_bytes for sample in samples) < SMALLEST_SAMPLE:
        return ok("the files are too small to tell the storage's speed")
    rates = [sample.num_bytes / sample.seconds for sample in samples]
    slowest = min(range(len(rates)), key=rates.__getitem__)
    load_seconds = max(sample.file_bytes / rate for sample, rate in zip(samples, rates, strict=True))
    text = (
        f"{sum(rates) / 1e6:,.0f} MB/s together, {rates[slowest] / 1e6:,.0f} the slowest (rank {slowest}): a cold load "
        f"takes about {load_seconds:,.1f} s"
    )
    return warning(f"{text}: copy the set to a faster file system") if load_seconds > PATIENCE_SECONDS else ok(text)


def checksums_check(shards: ShardSet, rank: int, size: int) -> Check[int]:
    """That every byte of the set is as it was written: what `sharder.verify` does, spread over the ranks."""
    parts = shares(list(shards.manifest.tensors.values()), size)
    largest = max(sum(entry.num_bytes for entry in part) for part in parts)

    def judge(byte_counts: Sequence[int]) -> Row:
        count = len(shards.manifest.tensors)
        return ok(f"all {count} tensors are as they were written, {sum(byte_counts) / 1e6:,.1f} MB")

    return Check("checksums", lambda: verify_share(shards, parts[rank]), judge, 60.0 + largest / SLOWEST_RATE)


def shares(entries: Sequence[TensorEntry], size: int) -> list[list[TensorEntry]]:
    """Return an even part of the tensors for each rank: the largest first, each to who has least."""
    parts: list[list[TensorEntry]] = [[] for _ in range(size)]
    totals = [0] * size
    for entry in sorted(entries, key=lambda entry: -entry.num_bytes):
        least = totals.index(min(totals))
        parts[least].append(entry)
        totals[least] += entry.num_bytes
    return parts


def verify_share(shards: ShardSet, entries: Sequence[TensorEntry]) -> int:
    """Join these tensors from the parts of all ranks and return their bytes. Raises FileError for what is damaged."""
    shards.open_tokenizer()
    with open_joiner(shards) as joiner:
        for entry in entries:
            joiner.join(entry)
    return sum(entry.num_bytes for entry in entries)
