"""Tensors read by threads ahead of their use: the bytes, the order, the bound on memory, and every way to fail."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from h5py import h5s

from mpi_tp.errors import FileError, StoppedError
from mpi_tp.partition.plan import PlannedTensor
from mpi_tp.shards import rank_file as rank_file_module
from mpi_tp.shards.dtypes import DTYPES
from mpi_tp.shards.rank_file import RankFile
from mpi_tp.shards.read_ahead import ReadAhead
from mpi_tp.shards.reader import ShardSet
from tests.support.parallel import CPU
from tests.support.shards import flip, set_options, write_set

FILE = "rank-00000-of-00001.h5"
PIECE = 512
BYTES = {"empty": 0, "one": 8, "piece": PIECE, "more": PIECE + 8, "many": 9000, "aligned": 8192, "last": 40}
READERS = [0, 1, 4]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file_module, "CHUNK_BYTES", PIECE)


def write(directory: Path, dtype: torch.dtype = torch.uint8) -> Path:
    """A set for one rank whose tensors have BYTES random bytes each, and a scalar."""
    generator = torch.Generator().manual_seed(0)
    raw = {name: torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for name, size in BYTES.items()}
    tensors = {name: data.view(dtype) for name, data in raw.items()}
    tensors["scalar"] = raw["one"].view(dtype)[0]
    plan = {name: PlannedTensor(name, tuple(tensor.shape), None, ()) for name, tensor in tensors.items()}
    write_set(directory, tensors, plan, set_options(1))
    return directory


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RankFile]:
    with ShardSet.open(write(tmp_path)).open_rank(0) as opened:
        yield opened


def ahead(file: RankFile, num_readers: int = 2, max_bytes: int = 1 << 20) -> ReadAhead:
    return ReadAhead(file, CPU, file.read_into, num_readers, max_bytes)


def take_all(file: RankFile, num_readers: int) -> None:
    with ahead(file, num_readers) as tensors:
        for name in file.tensors:
            tensors.take(name)


def readers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensor reader")]


def raw_by_h5py(path: Path, name: str) -> bytes:
    """The stored bytes, by HDF5 itself, without conversion."""
    with h5py.File(path) as opened:
        dataset = opened[name]
        stored = np.empty(dataset.shape, f"V{dataset.id.get_type().get_size()}")
        if dataset.size:
            dataset.id.read(h5s.ALL, h5s.ALL, stored, mtype=dataset.id.get_type())
        return stored.tobytes()


@pytest.mark.parametrize("num_readers", READERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_that_hdf5_reads(tmp_path: Path, dtype: torch.dtype, num_readers: int) -> None:
    with ShardSet.open(write(tmp_path, dtype)).open_rank(0) as file, ahead(file, num_readers) as tensors:
        for name in file.tensors:
            tensor = tensors.take(name)
            assert (tensor.dtype, tensor.shape) == (dtype, file.tensors[name].shape)
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw_by_h5py(tmp_path / FILE, name), name
            assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("max_bytes", [0, 600, 9000, 1 << 20])
@pytest.mark.parametrize("num_readers", READERS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_tensors_are_taken_in_any_order(file: RankFile, seed: int | None, num_readers: int, max_bytes: int) -> None:
    names = list(file.tensors)[::-1]
    if seed is not None:
        np.random.default_rng(seed).shuffle(names)
    with ahead(file, num_readers, max_bytes) as tensors:
        for name in names:
            assert torch.equal(tensors.take(name), file.read(name)), name
    assert not readers_alive()


def test_tensors_are_read_side_by_side_before_they_are_taken(file: RankFile) -> None:
    together = threading.Barrier(3, timeout=60)

    def read_into(name: str, tensor: torch.Tensor) -> None:
        if name in ("piece", "more", "many"):
            together.wait()
        file.read_into(name, tensor)

    with ReadAhead(file, CPU, read_into, 3, 1 << 20) as tensors:
        assert torch.equal(tensors.take("empty"), file.read("empty"))
        assert torch.equal(tensors.take("many"), file.read("many"))


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_read_ahead_is_bounded(file: RankFile, order: int) -> None:
    limit = 2 * PIECE + 40
    started: set[str] = set()
    taken: set[str] = set()
    held: list[int] = []

    def read_into(name: str, tensor: torch.Tensor) -> None:
        started.add(name)
        file.read_into(name, tensor)
        held.append(sum(file.tensors[name].num_bytes for name in started - taken))

    with ReadAhead(file, CPU, read_into, 4, limit) as tensors:
        for name in list(file.tensors)[::order]:
            taken.add(name)
            tensors.take(name)
    assert started == taken
    assert max(held) <= limit
    assert max(held) > PIECE


@pytest.mark.parametrize("num_readers", READERS)
@pytest.mark.parametrize("name", ["one", "more", "many", "last"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_bit_is_told_when_its_tensor_is_taken(
    tmp_path: Path, file: RankFile, name: str, share: float, num_readers: int
) -> None:
    part = file.tensors[name]
    flip(tmp_path / FILE, part.offset + int(share * (part.num_bytes - 1)), mask=128)
    taken = []
    with ahead(file, num_readers) as tensors, pytest.raises(FileError, match=f"{FILE}: tensor {name} of rank 0 is dam"):
        taken.extend(other for other in file.tensors if tensors.take(other) is not None)
    assert taken == list(file.tensors)[: list(file.tensors).index(name)]
    assert not readers_alive()


@pytest.mark.parametrize("num_readers", READERS)
def test_a_file_that_is_cut_off_while_it_is_read_is_told(tmp_path: Path, file: RankFile, num_readers: int) -> None:
    cut = file.tensors["many"].offset + 5000
    with ahead(file, num_readers, max_bytes=5000) as tensors:
        tensors.take("empty")
        os.truncate(tmp_path / FILE, cut)
        with pytest.raises(FileError, match=rf"{FILE}: tensor many of rank 0 is cut off at byte {cut}"):
            tensors.take("many")
    assert not readers_alive()


@pytest.mark.parametrize("num_readers", READERS)
def test_a_read_that_the_system_refuses_is_told(
    file: RankFile, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(FileError, match="tensor one of rank 0 cannot be read: Input"):
        take_all(file, num_readers)
    assert not readers_alive()


@pytest.mark.parametrize("num_readers", READERS)
def test_reads_that_give_less_than_asked_for_go_on(
    file: RankFile, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: file.read(name) for name in file.tensors}
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:100]], offset))
    with ahead(file, num_readers) as tensors:
        assert all(torch.equal(tensors.take(name), tensor) for name, tensor in expected.items())


def test_whoever_gives_up_does_not_wait_for_what_is_being_read(file: RankFile) -> None:
    reading = threading.Barrier(3, timeout=60)
    ended: list[BaseException] = []

    def slow() -> Iterator[memoryview]:
        while True:
            time.sleep(0.001)
            yield memoryview(bytearray(1))

    def read_into(name: str, tensor: torch.Tensor) -> None:
        """Read the tensor a byte a millisecond, again and again: nothing but the interruption ends it."""
        if name == "empty":
            return
        reading.wait()
        try:
            while True:
                for _ in file.pieces(name, slow()):
                    pass
        except StoppedError as error:
            ended.append(error)
            raise

    def give_up() -> None:
        with ReadAhead(file, CPU, read_into, 2, 1 << 20) as tensors:
            tensors.take("empty")
            reading.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert not readers_alive()
    assert sorted(str(error).split()[2] for error in ended) == ["one", "piece"]
