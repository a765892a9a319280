"""Questions to all ranks, each with a bound on its time: a rank that does not answer is named, and waited for no more.

It needs nothing of MPI but messages of the ranks to rank 0 and back, so that a rank which hangs holds up nobody.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpi_tp.devices import rank_names
from mpi_tp.doctor.rows import Report, Row, failure
from mpi_tp.errors import ConfigurationError, JobError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_GRACE_SECONDS = 5.0
"""What a rank may come later than its own bound."""
_POLL_SECONDS = 0.002
_TAG = 1


@dataclass(frozen=True)
class Check(Generic[T]):
    """Something to find out: `probe` on every rank, within `seconds`; `judge` makes a row of what all have found.

    `judge` gets the answers in rank order and may raise ConfigurationError, which is a failure, as is any error of a
    probe.
    """

    name: str
    probe: Callable[[], T]
    judge: Callable[[Sequence[T]], Row]
    seconds: float = 60.0


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one rank has found, or why it has found nothing; `is_late` if its probe has not ended."""

    value: T | None = None
    error: str | None = None
    is_late: bool = False


class Panel:
    """All ranks of a job. They make the same checks in the same order and get the same rows."""

    def __init__(self, world: "MPI.Intracomm", report: Report) -> None:
        self._world = world
        self._report = report
        self._sent: list[MPI.Request] = []  # a message's buffer must outlive it

    def ask(self, check: Check[T]) -> list[T] | None:
        """Make a check, report its row and return what the ranks have found; None if one has found nothing.

        Raises ConfigurationError, after the end of the report, if a rank does not answer in time: it could hold up
        whatever comes next.
        """
        answers = self._exchange(ask_bounded(check.probe, check.seconds), check.seconds)
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer is not None and answer.error}
        errors |= dict.fromkeys(silent, f"no answer in {check.seconds:g} s: look at the process and its host")
        row = failure(_join(errors, len(answers))) if errors else _judge(check, answers)
        self._report.add(check.name, row)
        late = silent or [rank for rank, answer in enumerate(answers) if answer is not None and answer.is_late]
        if late:
            self._report.close()
            raise ConfigurationError(f"{rank_names(late)} did not answer in time: no further checks were made")
        return None if errors else _values(answers)

    def report(self, name: str, row: Row) -> None:
        """Report the row of what needs no answers."""
        self._report.add(name, row)

    def _exchange(self, mine: Answer[T], seconds: float) -> list[Answer[T] | None]:
        """Return every rank's answer on every rank, None for a rank that gives none: then only rank 0 returns."""
        rank, size = self._world.rank, self._world.size
        if rank != 0:
            self._send(mine, 0)
            answers = self._receive({0}, seconds + 3 * _GRACE_SECONDS).get(0)
            return answers or [None, *[mine] * (size - 1)]
        received = self._receive(set(range(1, size)), seconds + _GRACE_SECONDS)
        answers = [mine, *(received.get(other) for other in range(1, size))]
        if None not in answers:
            for other in range(1, size):
                self._send(answers, other)
        return answers

    def _send(self, message: object, rank: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._world.isend(message, rank, _TAG))

    def _receive(self, ranks: set[int], seconds: float) -> dict[int, Any]:
        """Return what comes from `ranks` within some seconds."""
        received: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(received) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks - received.keys():
                if self._world.iprobe(rank, _TAG):
                    received[rank] = self._world.recv(source=rank, tag=_TAG)
            time.sleep(_POLL_SECONDS)
        return received


def ask_bounded(probe: Callable[[], T], seconds: float) -> Answer[T]:
    """Return what `probe` finds, in a thread that is left behind after some seconds."""
    answers: list[Answer[T]] = []

    def run() -> None:
        try:
            answers.append(Answer(probe()))
        except JobError as error:
            answers.append(Answer(error=str(error)))
        except Exception as error:  # whatever a machine does to a probe is a finding
            answers.append(Answer(error=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    frame = sys._current_frames()[thread.ident or 0]
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return Answer(error=f"no answer in {seconds:g} s, it hangs at {place}", is_late=True)


def _judge(check: Check[T], answers: Sequence[Answer[T] | None]) -> Row:
    try:
        return check.judge(_values(answers))
    except ConfigurationError as error:
        return failure(str(error))


def _values(answers: Sequence[Answer[T] | None]) -> list[Any]:
    return [answer.value for answer in answers if answer is not None]


def _join(errors: Mapping[int, str], size: int) -> str:
    """Return the ranks' errors as one text, an error that several have once."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(errors):
        by_text.setdefault(errors[rank], []).append(rank)
    if len(by_text) == 1 and len(errors) == size:
        return next(iter(by_text))
    return "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items())
