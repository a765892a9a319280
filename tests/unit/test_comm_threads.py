"""Ranks as threads, and the communicator of one rank."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.comm.threads import ThreadCommunicator, run_ranks
from tests.support import conformance

CPU = torch.device("cpu")
Check = Callable[[Communicator, torch.device], None]
every_check = pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@every_check
def test_threads_conform(check: Check, n: int) -> None:
    run_ranks(n, lambda comm: check(comm, CPU))


@every_check
def test_single_conforms(check: Check) -> None:
    check(SingleCommunicator(), CPU)


class Losing:
    """A communicator that does the work of one method and throws its result away."""

    def __init__(self, comm: ThreadCommunicator, method: str, lost: Callable[..., Any]) -> None:
        self._comm = comm
        self._method = method
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._comm, name)
        if name != self._method:
            return real

        def losing(*args: Any) -> Any:
            real(*[arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args])
            return self._lost(*args)

        return losing


def _first(value: Any, *_: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("method", "lost", "check"),
    [
        ("all_reduce", _first, conformance.all_reduce_sums_in_place),
        ("all_gather", _first, conformance.all_gather_concatenates),
        ("reduce_scatter", _first, conformance.reduce_scatter_sums_blocks),
        ("broadcast", _first, conformance.broadcast_overwrites),
        ("recv", _first, conformance.messages_go_round_a_ring),
        ("bcast_object", _first, conformance.objects_reach_everyone),
        ("all_gather_object", lambda value: [value], conformance.objects_reach_everyone),
    ],
)
def test_conformance_notices_a_lost_result(method: str, lost: Callable[..., Any], check: Check) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        run_ranks(3, lambda comm: check(Losing(comm, method, lost), CPU))


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_first_error_ends_all_ranks(guilty: int) -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == guilty:
            raise KeyError("mine")
        comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, fail)


def test_an_error_wakes_a_rank_that_receives() -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == 0:
            raise KeyError("mine")
        comm.recv(torch.zeros(1), 0)

    with pytest.raises(KeyError, match="mine"):
        run_ranks(2, fail)


def test_abort_ends_all_ranks_with_its_code() -> None:
    def abort(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(75)
        comm.barrier()

    with pytest.raises(SystemExit) as ended:
        run_ranks(2, abort)
    assert ended.value.code == 75


def test_ranks_that_call_different_collectives_fail_by_name() -> None:
    def disagree(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(2))
        else:
            comm.broadcast(torch.ones(2))

    with pytest.raises(AssertionError, match=r"all_reduce.*broadcast from 0"):
        run_ranks(2, disagree)


def test_a_rank_that_returns_early_fails_by_name() -> None:
    with pytest.raises(AssertionError, match=r"the end.*barrier"):
        run_ranks(2, lambda comm: comm.barrier() if comm.rank else None)


def test_a_message_that_nobody_sends_ends_in_time() -> None:
    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, lambda comm: comm.recv(torch.zeros(1), 0) if comm.rank else None, timeout=0.2)


def test_results_come_in_rank_order_without_gradients() -> None:
    assert run_ranks(3, lambda comm: (comm.rank, torch.is_grad_enabled())) == [(r, False) for r in range(3)]
