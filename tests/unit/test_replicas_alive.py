"""Rank 0 and the replicas tell each other that they live, and notice who does not."""

import threading
import time
from collections.abc import Callable

import pytest

from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.replica import Assignment, Report, Request, serve_replica
from mpi_tp.engine.replicated import ReplicatedEngine
from mpi_tp.errors import StoppedError
from tests.support.mail import mail_of_threads
from tests.support.replicas import BATCH_SIZE, Cluster, CountingEngine, answer_of, run, tokens


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rank_0_keeps_all_alive_while_it_waits_for_input() -> None:
    cluster = Cluster([CountingEngine(), CountingEngine()])
    cluster.engine.keep_alive()
    wait_for(lambda: cluster.steps[1] == 1)
    assert [engine.times_kept_alive for engine in cluster.engines] == [1, 1]
    cluster.close()


def test_idle_replicas_are_kept_alive_while_another_works() -> None:
    idle = [CountingEngine(), CountingEngine()]

    class BusyEngine(CountingEngine):
        """Is at it until the others have been kept alive."""

        def step(self) -> list[Outcome]:
            time.sleep(0.01)
            return super().step() if all(engine.times_kept_alive for engine in idle) else []

    cluster = Cluster([BusyEngine(), *idle], stall_timeout=0.4)
    cluster.engine.submit(0, [1], answer_of(3))
    assert tokens(cluster.run()[0]) == [3]
    cluster.close()


def test_a_replica_at_work_lets_rank_0_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpi_tp.engine.replica.KEEP_ALIVE_SECONDS", 0.0)
    mail, other = mail_of_threads(2)
    thread = threading.Thread(target=serve_replica, args=(CountingEngine(), other, lambda: None))
    thread.start()
    mail.send(Assignment([Request(7, [1], answer_of(5))]), 1)
    reports: list[Report] = []
    while not (reports and reports[-1].outcomes):
        reports += [each for _, each in mail.receive(1.0)]
    assert [each.num_sampled for each in reports] == [1, 2, 3, 4, 5]
    assert [outcome.key for outcome in reports[-1].outcomes] == [7]
    mail.send(None, 1)
    thread.join(60)
    assert not thread.is_alive()


def test_a_replica_that_is_not_heard_of_ends_the_job() -> None:
    mail, _, _ = mail_of_threads(3)
    engine = ReplicatedEngine(CountingEngine(), mail, BATCH_SIZE, stall_timeout=0.2)
    for key in range(2):
        engine.submit(key, [1], answer_of(1))
    with pytest.raises(StoppedError, match=r"replica 1 of 3 has work and has not been heard of for 0\.2 s"):
        run(engine)


def test_an_idle_replica_makes_no_progress_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nobody would notice that rank 0 is gone."""
    monkeypatch.setattr("mpi_tp.engine.replica.PATIENCE_SECONDS", 0.001)
    cluster = Cluster([CountingEngine(), CountingEngine()])
    time.sleep(0.05)
    assert cluster.steps == [0, 0]
    cluster.close()
