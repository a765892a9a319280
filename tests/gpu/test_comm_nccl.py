"""NCCL, and MPI through the host, between GPU tensors. The ranks have a GPU each, or one together."""

from collections.abc import Callable

import pytest
import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.comm.nccl import NcclCommunicator
from tests.support import conformance
from tests.support.mpi_session import WORLD

Check = Callable[[Communicator, torch.device], None]
Collective = Callable[[Communicator, torch.Tensor], torch.Tensor]
every_check = pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)

DELAY_CYCLES = 50_000_000  # some 30 ms of a GPU


def even(size: int) -> list[int]:
    return [4] * size


def uneven(size: int) -> list[int]:
    return [4 + rank % 2 for rank in range(size)]


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x.clone()),
    "all_gather": lambda comm, x: comm.all_gather(x[:, :4].contiguous(), even(comm.size)),
    "all_gather of one row": lambda comm, x: comm.all_gather(x[:1, :4].contiguous(), even(comm.size)),
    "uneven all_gather": lambda comm, x: comm.all_gather(
        x[:, : uneven(comm.size)[comm.rank]].contiguous(), uneven(comm.size)
    ),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x[:, : 4 * comm.size].contiguous(), even(comm.size)),
    "uneven reduce_scatter": lambda comm, x: comm.reduce_scatter(
        x[:, : sum(uneven(comm.size))].contiguous(), uneven(comm.size)
    ),
    "broadcast": lambda comm, x: comm.broadcast(x.clone(), comm.size - 1),
}
every_collective = pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES.keys())
halves_too = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module")
def nccl(device: torch.device) -> NcclCommunicator:
    return NcclCommunicator.create(WORLD.Dup(), device, share_gpu=WORLD.size > torch.cuda.device_count())


@pytest.fixture(scope="module")
def mpi() -> MpiCommunicator:
    return MpiCommunicator(WORLD.Dup())


@every_check
def test_nccl_conforms(check: Check, nccl: NcclCommunicator, device: torch.device) -> None:
    check(nccl, device)


@every_check
def test_mpi_conforms_through_the_host(check: Check, mpi: MpiCommunicator, device: torch.device) -> None:
    check(mpi, device)


@halves_too
@every_collective
def test_a_graph_captures_and_replays(
    collective: Collective, dtype: torch.dtype, nccl: NcclCommunicator, mpi: MpiCommunicator, device: torch.device
) -> None:
    shape = [3, 5 * nccl.size]
    held = torch.zeros(shape, dtype=dtype, device=device)
    collective(nccl, held)  # NCCL connects the ranks at the first use
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = collective(nccl, held)
    for turn in range(3):
        held.copy_(conformance.held_by(nccl.rank + 10 * turn, shape, dtype, device))
        graph.replay()
        assert torch.equal(result, collective(mpi, held))


@halves_too
@every_collective
def test_a_collective_waits_for_no_device(
    collective: Collective, dtype: torch.dtype, nccl: NcclCommunicator, device: torch.device
) -> None:
    held = torch.zeros(3, 5 * nccl.size, dtype=dtype, device=device)
    collective(nccl, held)
    torch.cuda.set_sync_debug_mode("error")
    try:
        collective(nccl, held)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_collective
def test_a_collective_keeps_to_the_current_stream(
    collective: Collective, nccl: NcclCommunicator, mpi: MpiCommunicator, device: torch.device
) -> None:
    """What is queued before it on a side stream is done before, what comes after is done after."""
    shape = [3, 5 * nccl.size]
    held = torch.zeros(shape, device=device)
    values = conformance.held_by(nccl.rank, shape, torch.float32, device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(DELAY_CYCLES)
        held.copy_(values)
        result = collective(nccl, held).clone()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(result, collective(mpi, values))


@pytest.mark.parametrize("name", ["nccl", "mpi"])
def test_a_barrier_waits_for_the_device(
    name: str, nccl: NcclCommunicator, mpi: MpiCommunicator, device: torch.device
) -> None:
    done = torch.cuda.Event()
    torch.cuda._sleep(DELAY_CYCLES)
    done.record()
    {"nccl": nccl, "mpi": mpi}[name].barrier()
    assert done.query()


def test_a_tensor_on_another_device_is_refused(nccl: NcclCommunicator) -> None:
    with pytest.raises(AssertionError, match="tensor on cpu, communicator on cuda"):
        nccl.all_reduce(torch.zeros(2))
