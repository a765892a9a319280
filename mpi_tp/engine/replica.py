"""A replica of the model that rank 0 is not part of: its first rank takes requests from rank 0 and sends outcomes back.

The two tell each other that they live: rank 0 sends assignments, if need be empty ones, and so does a replica at work
with its reports. Whoever hears nothing makes no progress, which its watchdog notices.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mpi_tp.comm.base import Mail
from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.prompt import Prompt
from mpi_tp.engine.request import RequestError, SamplingParams

KEEP_ALIVE_SECONDS = 1.0
"""How often, at least, a replica hears from rank 0, and rank 0 from a replica at work."""
PATIENCE_SECONDS = 0.25
"""How long an idle replica sleeps at most before it looks whether it is still wanted."""


@dataclass(frozen=True)
class Request:
    """A prompt under a number that no other has."""

    number: int
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Assignment:
    """What rank 0 wants of a replica; without anything in it, that it stays."""

    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Numbers of requests."""


@dataclass(frozen=True)
class Report:
    """What a replica has finished since its last report, and its figures so far."""

    outcomes: list[Outcome]
    """Their keys are the requests' numbers."""
    num_sampled: int
    num_preemptions: int


def admit(engine: ServingEngine, requests: Iterable[Request]) -> list[Outcome]:
    """Submit requests; return the outcomes of those that cannot be served."""
    refused = []
    for request in requests:
        try:
            engine.submit(request.number, request.prompt, request.params)
        except RequestError as error:
            refused.append(Outcome(request.number, 0, [], error))
    return refused


def serve_replica(engine: ServingEngine, mail: Mail, on_step: Callable[[], None]) -> None:
    """Serve what rank 0 assigns until it says None; `on_step` is called whenever there is progress."""
    reported = time.monotonic()
    while True:
        assignments = [assignment for _, assignment in mail.receive(PATIENCE_SECONDS if engine.is_idle else 0.0)]
        outcomes = []
        for assignment in assignments:
            if assignment is None:
                engine.close()
                mail.send(None, 0)
                return
            outcomes += admit(engine, assignment.requests)
            for number in assignment.cancelled:
                engine.cancel(number)
        if not engine.is_idle:
            outcomes += engine.step()
        elif assignments:
            engine.keep_alive()
        else:
            continue
        if outcomes or time.monotonic() - reported > KEEP_ALIVE_SECONDS:
            mail.send(Report(outcomes, engine.num_sampled, engine.num_preemptions), 0)
            reported = time.monotonic()
        on_step()
