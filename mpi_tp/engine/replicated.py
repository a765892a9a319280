"""Several replicas of a model behind one engine, on rank 0: whoever has the least to do gets the next request."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpi_tp.comm.base import Mail
from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.prompt import Prompt
from mpi_tp.engine.replica import KEEP_ALIVE_SECONDS, Assignment, Request, admit
from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import StoppedError

IDLE_SECONDS = 0.02
"""How long a step lasts at most in which rank 0's own replica has nothing to do."""


@dataclass
class _Replica:
    """What rank 0 knows of a replica."""

    num_sequences: int = 0
    """Those that it has and whose outcomes are not known."""
    heard: float = 0.0
    """When it was last heard of, or got work after it had none."""
    num_sampled: int = 0
    num_preemptions: int = 0


@dataclass
class _InFlight:
    """A request without outcome; `replica` is None while it waits."""

    key: Any
    num_sequences: int
    replica: int | None = None


class ReplicatedEngine:
    """Distributes requests over `engine`, that of rank 0's own replica, and the replicas that `mail` reaches.

    Requests wait on rank 0; each replica has what it can run at once, `max_batch_size` sequences, and half as many
    more, so that it does not run dry while rank 0 is busy with a step of its own. `step` raises StoppedError if a
    replica with work has not been heard of for `stall_timeout` seconds.
    """

    def __init__(self, engine: ServingEngine, mail: Mail, max_batch_size: int, stall_timeout: float) -> None:
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._mail = mail
        self._window = max_batch_size + max(1, max_batch_size // 2)
        self._stall_timeout = stall_timeout
        self._keep_alive_seconds = min(KEEP_ALIVE_SECONDS, stall_timeout / 4)
        self._kept_alive = time.monotonic()
        self._replicas = [_Replica() for _ in range(mail.size)]
        self._numbers = itertools.count()
        self._waiting: deque[Request] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._outcomes: list[Outcome] = []
        self.num_waiting = 0
        """How many sequences no replica has yet."""

    @property
    def num_sampled(self) -> int:
        """Tokens generated so far, as far as is known here."""
        return self._engine.num_sampled + sum(replica.num_sampled for replica in self._replicas)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence has lost its cache blocks to older ones, as far as is known here."""
        return self._engine.num_preemptions + sum(replica.num_preemptions for replica in self._replicas)

    @property
    def is_idle(self) -> bool:
        """Whether every submitted request has its outcome and no step is in flight."""
        return not self._in_flight and not self._outcomes and self._engine.is_idle

    def submit(self, key: Any, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt under a `key` that no request in flight has; what is wrong with it is in its outcome."""
        number = next(self._numbers)
        self._in_flight[number] = _InFlight(key, params.n)
        self._waiting.append(Request(number, prompt, params))
        self.num_waiting += params.n

    def cancel(self, key: Any) -> None:
        """Drop a request, which then has no outcome; nothing happens if it has had it already."""
        self._outcomes = [outcome for outcome in self._outcomes if outcome.key != key]
        number = next((number for number, request in self._in_flight.items() if request.key == key), None)
        if number is None:
            return
        request = self._in_flight.pop(number)
        if request.replica is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.number != number)
            self.num_waiting -= request.num_sequences
            return
        self._replicas[request.replica].num_sequences -= request.num_sequences
        if request.replica:
            self._mail.send(Assignment(cancelled=[number]), request.replica)
        else:
            self._engine.cancel(number)

    def step(self) -> list[Outcome]:
        """Assign what waits, run a step of rank 0's replica; return the outcomes that are known by now."""
        self._hear()
        self._assign()
        if time.monotonic() - self._kept_alive > self._keep_alive_seconds:
            self.keep_alive()
        if not self._engine.is_idle:
            self._finish(self._engine.step())
        elif not self._outcomes:
            self._hear(IDLE_SECONDS)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def keep_alive(self) -> None:
        """Let the other ranks see that rank 0 lives."""
        if self._engine.is_idle:
            self._engine.keep_alive()
        for replica in range(1, self._mail.size):
            self._mail.send(Assignment(), replica)
        self._kept_alive = time.monotonic()

    def close(self) -> None:
        """Release the other ranks; what they have not finished yet, is dropped."""
        released = set(range(1, self._mail.size))
        for replica in released:
            self._mail.send(None, replica)
        self._engine.close()
        while released:
            released -= {replica for replica, report in self._mail.receive(IDLE_SECONDS) if report is None}

    def _hear(self, wait_seconds: float = 0.0) -> None:
        """Take the reports that have arrived. Raises StoppedError if one is overdue."""
        now = time.monotonic()
        for index, report in self._mail.receive(wait_seconds):
            replica = self._replicas[index]
            replica.heard = now
            replica.num_sampled, replica.num_preemptions = report.num_sampled, report.num_preemptions
            self._finish(report.outcomes)
        for index, replica in enumerate(self._replicas):
            if index and replica.num_sequences and now - replica.heard > self._stall_timeout:
                raise StoppedError(
                    f"replica {index} of {len(self._replicas)} has work and has not been heard of for "
                    f"{self._stall_timeout:g} s: run the same command again"
                )

    def _assign(self) -> None:
        """Give what waits, in order, to the replicas with the least to do, as far as they have room."""
        assigned: dict[int, list[Request]] = {}
        while self._waiting:
            index, replica = min(enumerate(self._replicas), key=lambda pair: pair[1].num_sequences)
            if replica.num_sequences >= self._window:
                break
            if not replica.num_sequences:
                replica.heard = time.monotonic()
            request = self._waiting.popleft()
            self._in_flight[request.number].replica = index
            self.num_waiting -= request.params.n
            replica.num_sequences += request.params.n
            assigned.setdefault(index, []).append(request)
        own = assigned.pop(0, [])
        for index, requests in assigned.items():
            self._mail.send(Assignment(requests), index)
        self._finish(admit(self._engine, own))

    def _finish(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            request = self._in_flight.pop(outcome.key, None)
            if request is None:
                continue  # cancelled meanwhile
            assert request.replica is not None, "an outcome of what nobody had"
            self._replicas[request.replica].num_sequences -= request.num_sequences
            self._outcomes.append(dataclasses.replace(outcome, key=request.key))
