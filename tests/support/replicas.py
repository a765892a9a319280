"""Engines of scripts that count, and several of them behind one engine."""

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine, Outcome
from mpi_tp.engine.replica import serve_replica
from mpi_tp.engine.replicated import ReplicatedEngine
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.scheduler import Scheduler
from tests.support.mail import mail_of_threads
from tests.unit.test_engine_stop import ScriptedRunner

VOCABULARY = 10
BATCH_SIZE = 4
WINDOW = 6


class CountingEngine(Engine):
    """Always says token 3; knows which requests it got, and how often it was kept alive."""

    def __init__(self, batch_size: int = BATCH_SIZE, num_blocks: int = 40) -> None:
        super().__init__(
            SingleCommunicator(),
            ScriptedRunner([3] * 200, VOCABULARY),
            Scheduler(BlockPool(num_blocks), batch_size),
            None,
            context_length=100,
            eos_token_ids=frozenset(),
            vocab_size=VOCABULARY,
        )
        self.submitted: list[Any] = []
        self.most_at_once = 0
        self.times_kept_alive = 0
        self.is_closed = False

    def submit(self, key: Any, prompt: Any, params: SamplingParams) -> None:
        self.submitted.append(key)
        super().submit(key, prompt, params)
        self.most_at_once = max(self.most_at_once, self.num_waiting + self.num_running)

    def keep_alive(self) -> None:
        self.times_kept_alive += 1
        super().keep_alive()

    def close(self) -> None:
        self.is_closed = True
        super().close()


def run(engine: ReplicatedEngine) -> dict[Any, Outcome]:
    """Return every request's outcome, of which it may have but one."""
    outcomes: dict[Any, Outcome] = {}
    while not engine.is_idle:
        for outcome in engine.step():
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
    return outcomes


@dataclass
class Cluster:
    """An engine over replicas, of which the others run in threads."""

    engines: list[Any]
    stall_timeout: float = 60.0
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, *others = mail_of_threads(len(self.engines))
        self.steps = [0] * len(self.engines)
        self._threads = [
            threading.Thread(target=serve_replica, args=(engine, mail, functools.partial(self._count, mail.rank)))
            for engine, mail in zip(self.engines[1:], others, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self.engine = ReplicatedEngine(self.engines[0], own, BATCH_SIZE, self.stall_timeout)

    def run(self) -> dict[Any, Outcome]:
        return run(self.engine)

    def close(self) -> None:
        self.engine.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert all(engine.is_closed for engine in self.engines)

    def _count(self, rank: int) -> None:
        self.steps[rank] += 1


def answer_of(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(num_tokens, n=n, ignore_eos=True)


def tokens(outcome: Outcome) -> list[int]:
    return [len(completion.token_ids) for completion in outcome.completions]
