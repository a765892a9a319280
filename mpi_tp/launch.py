"""Start and end of a program under MPI: all ranks go on together, or all end together, with one message and one code.

A program looks like this:

    def main(argv: Sequence[str] | None = None) -> NoReturn:
        with launch.before_mpi():
            options = parse(argv)
        launch.run(lambda job: infer(job, options), options.stall_timeout)

    def infer(job: Job, options: Options) -> int:
        with job.phase("load"):     # if one rank fails in it, all ranks end with its error
            ...                     # job.progress() now and then
        return 0

Plain `python -m` under MPI hangs when one rank raises: the exit hook of mpi4py waits for the others. So `run` lets no
exception pass, but ends all ranks by `MPI_Abort`.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from mpi_tp.comm.heartbeat import Heartbeat
from mpi_tp.comm.world import end_mpi, start_mpi
from mpi_tp.errors import JobError, StoppedError, UsageError
from mpi_tp.last_words import LastWords, outcome
from mpi_tp.launcher import check_launcher, launched_rank, launched_size, see_launcher_end
from mpi_tp.status import Status, StatusFile
from mpi_tp.stop_request import STOPPING as _STOPPING
from mpi_tp.stop_request import StopRequest
from mpi_tp.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

_PATIENCE_SECONDS = 2.0  # how long a failed rank waits for the others to fail alike
_END_SECONDS = 10.0  # how long a rank with nothing to say waits to be ended


class PeerError(JobError):
    """Another rank has failed and says why; this one has nothing to add."""


class Job:
    """The ranks that one launcher has started, and what this one of them is doing; made by `run` and `join`."""

    def __init__(self, world: "MPI.Intracomm", status: Status, watchdog: Watchdog, last_words: LastWords) -> None:
        from mpi4py import MPI

        self.world = world
        self.rank: int = world.rank
        self.size: int = world.size
        self.stall_timeout = watchdog.stall_timeout
        self.status = status
        """What this rank is doing, for its last words; who knows more, its device say, adds it."""
        status.rank, status.size = self.rank, self.size
        last_words.world = world
        self._last_words = last_words
        self._watchdog = watchdog
        self._control = world.Dup()  # its messages meet no others, whatever a failed rank was doing
        self._heartbeat: Heartbeat | None = None
        if self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._heartbeat = watchdog.pulse = Heartbeat(world.Dup())
        self.stop = StopRequest(self._control)
        self.watch(self.stop.overdue)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what all ranks do next. They leave the phase together, or not at all.

        Raises `PeerError` at its end if another rank has failed.
        """
        self._watchdog.enter(name)
        yield
        self.leave_together()
        self._watchdog.leave()

    def progress(self) -> None:
        """Tell the watchdog that the phase goes on: a piece is read, a step done. Idle loops call it too."""
        self._watchdog.progress()

    def watch(self, failure: Callable[[], str | None]) -> None:
        """End all ranks when `failure()`, which a thread asks now and then, returns a message."""
        self._watchdog.failures.append(failure)

    def leave_together(self) -> None:
        """Wait until all ranks have come here. Raises `PeerError` if one has failed instead."""
        with self._watchdog.waiting():
            guilty = self._guilty_rank(claim=None)
        if guilty is not None:
            raise PeerError(f"rank {guilty} has failed")

    def finish(self) -> None:
        """End MPI, once all ranks have come here and the watchdog no longer needs it."""
        self._watchdog.enter("shutdown")
        self.leave_together()
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)  # all is done
        if self._heartbeat:
            self._heartbeat.close()
        self._last_words.world = None
        end_mpi()

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks with `error`, told once: by the lowest of the ranks that failed alike."""
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
        # A launcher stops the others when one has failed: those that were only stopped leave it the last word.
        was_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
        claim = self.size + self.rank if was_stopped else self.rank
        with self._watchdog.waiting():
            if isinstance(error, PeerError) or self._guilty_rank(claim) != self.rank:
                time.sleep(_END_SECONDS)
            exit_code, message, needs_traceback = outcome(error)
            self._last_words.end(exit_code, message, error if needs_traceback else None)

    def _guilty_rank(self, claim: int | None) -> int | None:
        """Agree on the rank with the lowest claim, modulo `size`; collective. None if no rank has one.

        A rank with a claim that the others leave alone, since they are busy or wait for it elsewhere, takes it to be
        itself.
        """
        from mpi4py import MPI

        no_claim = 2 * self.size
        mine = np.array([no_claim if claim is None else claim])
        lowest = np.empty_like(mine)
        request = self._control.Iallreduce(mine, lowest, MPI.MIN)
        patience = _PATIENCE_SECONDS + self._last_words.turn_seconds
        deadline = float("inf") if claim is None else time.monotonic() + patience
        while not request.Test():
            if time.monotonic() > deadline:
                return self.rank
            time.sleep(0.001)
        return int(lowest[0]) % self.size if lowest[0] < no_claim else None


def run(
    main: Callable[[Job], int],
    stall_timeout: float = 300.0,
    check_world: Callable[[int, Mapping[str, str]], None] = check_launcher,
) -> NoReturn:
    """Start MPI, call `main(job)` on every rank and exit with what it returns.

    Before that, `check_world(world size, environment)` raises `ConfigurationError` if the ranks are no world.

    Whatever goes wrong on one rank ends all of them with one line on stderr: a `JobError` with its own exit code, a
    signal, `stall_timeout` seconds without progress or without a sign of life with 75, memory that ran out with 78,
    anything else with a traceback and 70.
    """
    job = _start(stall_timeout, check_world)
    try:
        _heed_signals()
        exit_code = main(job)
        sys.stdout.flush()
        job.finish()
    except BaseException as error:  # SystemExit too: it would leave the other ranks waiting
        job.fail(error)
    sys.stderr.flush()
    os._exit(exit_code)  # without the end of the interpreter, in which no thread could notice that it hangs


def join(stall_timeout: float = 300.0) -> Job:
    """Start MPI in a script that does without `run`; an exception that it does not catch ends all ranks likewise."""
    job = _start(stall_timeout, check_launcher, script=True)
    sys.excepthook = lambda _, error, __: job.fail(error)
    atexit.register(_finish_script, job)
    _heed_signals()
    return job


@contextmanager
def before_mpi() -> Iterator[None]:
    """Around what a program does before `run`: errors and help are printed once, by the launcher's rank 0."""
    speaks = launched_rank(os.environ) == 0
    with contextlib.ExitStack() as muted:
        if not speaks:
            silence = muted.enter_context(open(os.devnull, "w"))
            muted.enter_context(contextlib.redirect_stdout(silence))
            muted.enter_context(contextlib.redirect_stderr(silence))
        try:
            yield
            return
        except SystemExit as end:
            exit_code, words, speaks_last = end.code, "", False
        except BaseException as error:
            exit_code, message, needs_traceback = outcome(error)
            details = "".join(traceback.format_exception(error)) if needs_traceback else ""
            words = f"{details}mpi_tp: {' '.join(message.split())}\n"
            speaks_last = not isinstance(error, UsageError)  # which all ranks have alike
    if not speaks and exit_code:
        # The launcher ends all ranks with the first: let that be rank 0, unless this one is alone with its failure.
        # Slurm takes the highest code, which is that of a signal, if one dies of it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_code))
        time.sleep(_END_SECONDS)
    if speaks or speaks_last:
        sys.stderr.write(words)
    if exit_code and launched_size(os.environ)[0] > 1:
        see_launcher_end()
    sys.exit(exit_code)


def _start(stall_timeout: float, check_world: Callable[[int, Mapping[str, str]], None], script: bool = False) -> Job:
    """Start MPI, which a rank that never comes could hold up for ever, under the watchdog's eyes."""
    launched, _ = launched_size(os.environ)
    status = Status(launched_rank(os.environ), launched, socket.gethostname())
    file = StatusFile(status, os.environ)
    file.write()
    last_words = LastWords(status, file)
    watchdog = Watchdog(status, file, stall_timeout, last_words.end_stalled, script)
    watchdog.start(launched=launched > 1)
    with before_mpi():
        world = start_mpi()
        check_world(world.size, os.environ)
    job = Job(world, status, watchdog, last_words)
    watchdog.leave()
    return job


def _finish_script(job: Job) -> None:
    try:
        job.finish()
    except BaseException as error:
        job.fail(error)


def _heed_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for further in _STOPPING:  # the clean-up that follows is not to be interrupted again
        signal.signal(further, signal.SIG_IGN)
    raise StoppedError(f"stopped by {signal.Signals(number).name}: run the same command again")
