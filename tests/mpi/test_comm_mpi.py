"""The host-staged MPI communicator, on however many ranks mpirun has started."""

import os
import tempfile
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI

from mpi_tp.comm import shared_memory
from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator, split_by_host
from tests.support import conformance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def comm() -> MpiCommunicator:
    return MpiCommunicator(MPI.COMM_WORLD.Dup())


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_mpi_conforms(check: Callable[[Communicator, torch.device], None], comm: MpiCommunicator) -> None:
    check(comm, CPU)


def test_float32_is_summed_where_it_lies(comm: MpiCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode loop's all-reduce copies nothing on a CPU."""
    tensor = torch.ones(4, 8)
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch, "empty", None)
    assert comm.all_reduce(tensor).tolist() == [[float(comm.size)] * 8] * 4


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conforms_without_shared_memory(
    check: Callable[[Communicator, torch.device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", "/nowhere")
    check(MpiCommunicator(MPI.COMM_WORLD.Dup()), CPU)


def test_results_larger_and_smaller_than_a_slot_of_shared_memory(comm: MpiCommunicator) -> None:
    for rows in (3, 3 * shared_memory.SLOT_BYTES // (4 * comm.size) // 7 + 1, 2):
        mine = torch.full((rows, 7), float(comm.rank + rows))
        whole = comm.all_gather(mine, [7] * comm.size)
        assert torch.equal(whole, torch.arange(comm.size).repeat_interleave(7).expand(rows, -1).float() + rows)


def test_a_gathered_tensor_stays_as_it_is(comm: MpiCommunicator) -> None:
    results = [comm.all_gather(torch.full((2, 3), float(10 * turn + comm.rank)), [3] * comm.size) for turn in range(6)]
    for turn, whole in enumerate(results):
        assert torch.equal(whole, torch.arange(comm.size).repeat_interleave(3).expand(2, -1) + 10.0 * turn)


def test_shared_memory_is_used_and_leaves_no_file(comm: MpiCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tempfile.mkdtemp(dir=shared_memory.FOLDER))
    own = MPI.COMM_WORLD.Dup()
    shared = shared_memory.share_memory(own, split_by_host(own))
    assert shared is not None
    assert not os.listdir(shared_memory.FOLDER)
    os.rmdir(shared_memory.FOLDER)


def test_one_rank_that_sees_no_shared_memory_leaves_all_without(monkeypatch: pytest.MonkeyPatch) -> None:
    own = MPI.COMM_WORLD.Dup()
    if own.rank == own.size - 1:
        monkeypatch.setattr(shared_memory, "_map", lambda path: None)
    assert shared_memory.share_memory(own, split_by_host(own)) is None


def test_ranks_of_one_host_keep_their_order() -> None:
    host = split_by_host(MPI.COMM_WORLD)
    assert host.allgather(MPI.COMM_WORLD.rank) == sorted(host.allgather(MPI.COMM_WORLD.rank))
