"""The host-staged MPI communicator, on however many ranks mpirun has started."""

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI

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


def test_ranks_of_one_host_keep_their_order() -> None:
    host = split_by_host(MPI.COMM_WORLD)
    assert host.allgather(MPI.COMM_WORLD.rank) == sorted(host.allgather(MPI.COMM_WORLD.rank))
