"""Several replicas behind one engine: who gets what, and that nothing is lost; scripts play the models."""

import threading
import time
from typing import Any

import pytest

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.comm.threads import run_ranks
from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.replica import Assignment, Report, Request, serve_replica
from mpi_tp.engine.replicated import ReplicatedEngine
from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import ConfigurationError
from mpi_tp.replicas import check_multiple
from tests.support.engines import Setting, build_engine, build_runner, serve
from tests.support.mail import QueueMail, mail_of_threads
from tests.support.replicas import BATCH_SIZE, WINDOW, Cluster, CountingEngine, answer_of, run, tokens
from tests.support.tiny import tiny_model


def test_every_request_has_its_outcome_under_its_own_key() -> None:
    cluster = Cluster([CountingEngine() for _ in range(3)])
    wanted = {f"key {at}": (1 + at * 7 % 30, 1 + at % 3) for at in range(50)}
    for key, (length, n) in wanted.items():
        cluster.engine.submit(key, [1, 2], answer_of(length, n))
    assert cluster.engine.num_waiting == sum(n for _, n in wanted.values())
    outcomes = cluster.run()
    assert {key: tokens(outcome) for key, outcome in outcomes.items()} == {
        key: [length] * n for key, (length, n) in wanted.items()
    }
    assert all(outcome.prompt_tokens == 2 and outcome.error is None for outcome in outcomes.values())
    assert cluster.engine.num_waiting == 0
    assert cluster.engine.num_sampled == sum(length * n for length, n in wanted.values())
    assert cluster.engine.num_preemptions == 0
    cluster.close()
    assert all(engine.submitted for engine in cluster.engines)


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    cluster = Cluster([CountingEngine() for _ in range(2)])
    prompts: list[Any] = [[1], [], [2], [99], [3], [1] * 100, [4], "text", [5]]
    for key, prompt in enumerate(prompts):
        cluster.engine.submit(key, prompt, answer_of(2))
    outcomes = cluster.run()
    errors = {key: outcome.error.type for key, outcome in outcomes.items() if outcome.error}
    assert errors == {1: "empty_prompt", 3: "unknown_token", 5: "prompt_too_long", 7: "no_tokenizer"}
    assert all(tokens(outcomes[key]) == [2] for key in (0, 2, 4, 6, 8))
    cluster.close()


def test_preemptions_of_all_replicas_are_counted() -> None:
    cluster = Cluster([CountingEngine(num_blocks=7) for _ in range(2)])
    for key in range(12):
        cluster.engine.submit(key, [1], answer_of(60))
    assert all(tokens(outcome) == [60] for outcome in cluster.run().values())
    assert cluster.engine.num_preemptions == sum(engine.num_preemptions for engine in cluster.engines) > 0
    cluster.close()


@pytest.fixture
def by_hand() -> tuple[ReplicatedEngine, CountingEngine, QueueMail, QueueMail]:
    """An engine over three replicas, two of which the test plays."""
    own = CountingEngine()
    mail, *others = mail_of_threads(3)
    return ReplicatedEngine(own, mail, BATCH_SIZE, stall_timeout=60.0), own, others[0], others[1]


def assigned(mail: QueueMail) -> list[Request]:
    return [request for _, assignment in mail.receive() for request in assignment.requests]


def report(mail: QueueMail, requests: list[Request]) -> None:
    mail.send(Report([Outcome(request.number, 1, []) for request in requests], 0, 0), 0)


def test_a_replica_never_has_more_than_its_window_and_gets_more_as_it_finishes(by_hand: Any) -> None:
    engine, own, second, third = by_hand
    for key in range(40):
        engine.submit(key, [1], answer_of(50))
    engine.step()
    held = assigned(second), assigned(third)
    assert [len(own.submitted), *map(len, held)] == [WINDOW] * 3
    assert engine.num_waiting == 40 - 3 * WINDOW
    # In the order of their submission, as far as the replicas share them.
    assert sorted([*own.submitted, *(r.number for part in held for r in part)]) == list(range(3 * WINDOW))
    report(third, held[1][:4])
    assert sorted(outcome.key for outcome in engine.step()) == sorted(r.number for r in held[1][:4])
    assert (len(assigned(second)), len(assigned(third))) == (0, 4)
    engine.step()
    assert (len(assigned(second)), len(assigned(third))) == (0, 0)


def test_the_least_loaded_gets_the_next_and_samples_count(by_hand: Any) -> None:
    engine, own, second, third = by_hand
    for n in (5, 1, 2, 1, 1, 1):
        engine.submit(object(), [1], answer_of(50, n))
    engine.step()
    assert len(own.submitted) == 1
    assert [request.params.n for request in assigned(second)] == [1, 1, 1]
    assert [request.params.n for request in assigned(third)] == [2, 1]


def test_more_samples_than_a_window_go_to_one_replica(by_hand: Any) -> None:
    engine, _, second, _ = by_hand
    engine.submit("many", [1], answer_of(1, 3 * WINDOW))
    engine.submit("other", [1], answer_of(1))
    outcomes: dict[Any, Outcome] = {}
    while "many" not in outcomes:
        outcomes |= {outcome.key: outcome for outcome in engine.step()}
    assert tokens(outcomes["many"]) == [1] * 3 * WINDOW
    assert [request.number for request in assigned(second)] == [1]


def test_a_slow_replica_gets_less() -> None:
    """Uneven work: a replica that takes ten times as long for a step ends with a small part of the requests."""

    class SlowEngine(CountingEngine):
        def step(self) -> list[Outcome]:
            time.sleep(0.02)
            return super().step()

    quick, slow = CountingEngine(), SlowEngine()
    cluster = Cluster([quick, slow])
    for key in range(120):
        cluster.engine.submit(key, [1], answer_of(3))
    assert len(cluster.run()) == 120
    cluster.close()
    assert WINDOW <= len(slow.submitted) < len(quick.submitted)
    assert max(quick.most_at_once, slow.most_at_once) <= WINDOW


def test_cancelled_requests_have_no_outcome(by_hand: Any) -> None:
    engine, own, second, third = by_hand
    for key in range(40):
        engine.submit(key, [1], answer_of(50))
    engine.step()
    held = {mail.rank: assigned(mail) for mail in (second, third)}
    engine.cancel(own.submitted[0])
    engine.cancel(held[1][0].number)
    engine.cancel(39)
    engine.cancel("never submitted")
    assert [assignment for _, assignment in second.receive()] == [Assignment(cancelled=[held[1][0].number])]
    report(second, held[1])  # its outcome was on its way
    outcomes = {outcome.key for outcome in engine.step()}
    assert outcomes == {request.number for request in held[1][1:]}
    assert len(assigned(second)) == WINDOW
    assert engine.num_waiting == 40 - 3 * WINDOW - 1 - WINDOW - 1
    report(third, held[2])
    while not own.is_idle:
        assert not {0, 39} & {outcome.key for outcome in engine.step()}


def test_a_cancelled_request_leaves_the_replica_that_runs_it() -> None:
    cluster = Cluster([CountingEngine(), CountingEngine()])
    for key in range(2):
        cluster.engine.submit(key, [1], answer_of(90))
    cluster.engine.step()
    for key in range(2):
        cluster.engine.cancel(key)
    assert cluster.run() == {}
    cluster.engine.submit(1, [1], answer_of(2))  # the key is free again
    assert tokens(cluster.run()[1]) == [2]
    cluster.close()
    assert all(engine.blocks_in_use == 0 for engine in cluster.engines)


def test_closing_drops_what_is_not_finished() -> None:
    cluster = Cluster([CountingEngine(), CountingEngine()])
    for key in range(20):
        cluster.engine.submit(key, [1], answer_of(90))
    cluster.engine.step()
    cluster.close()


def test_a_closed_engine_can_serve_again() -> None:
    """As a script does that calls `generate` twice."""
    engines = [CountingEngine(), CountingEngine()]
    mails = mail_of_threads(2)
    leader = ReplicatedEngine(engines[0], mails[0], BATCH_SIZE, 60.0)
    for _ in range(2):
        thread = threading.Thread(target=serve_replica, args=(engines[1], mails[1], lambda: None))
        thread.start()
        for key in range(6):
            leader.submit(key, [1], answer_of(3))
        assert sorted(run(leader)) == list(range(6))
        leader.close()
        thread.join(60)
    assert len(engines[1].submitted) == 6


def test_results_do_not_depend_on_the_replica() -> None:
    """Of a real model, with samples, stops and prompts of unequal lengths."""
    setting = Setting(tiny_model("llama3-rope"), max_batch_size=BATCH_SIZE)
    requests = [
        ("x" * (1 + 13 * at % 50), SamplingParams(1 + 5 * at % 17, 1.0, seed=at, n=1 + at % 2, logprobs=at % 3 == 0))
        for at in range(16)
    ]
    alone = serve(setting, requests)
    mails = mail_of_threads(2)

    def replica(index: int) -> dict[int, Outcome]:
        comm = SingleCommunicator()
        engine = build_engine(setting, comm, build_runner(setting, comm))
        if index:
            serve_replica(engine, mails[1], lambda: None)
            return {}
        leader = ReplicatedEngine(engine, mails[0], BATCH_SIZE, 60.0)
        for key, (prompt, params) in enumerate(requests):
            leader.submit(key, prompt, params)
        outcomes = run(leader)
        leader.close()
        return outcomes

    outcomes = run_ranks(2, lambda comm: replica(comm.rank))[0]
    assert [outcomes[key] for key in range(len(requests))] == alone


def test_a_world_that_is_no_multiple_is_refused() -> None:
    check_multiple(6, 3)
    with pytest.raises(
        ConfigurationError, match="--tensor-parallel is 3 but mpirun started 4 ranks: use -np 3 or a mul"
    ):
        check_multiple(4, 3)
