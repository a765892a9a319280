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

from mpi_tp.errors import ConfigurationError, JobError, StoppedError
from mpi_tp.stop_request import STOPPING as _STOPPING
from mpi_tp.stop_request import StopRequest
from mpi_tp.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

_PATIENCE_SECONDS = 2.0  # how long a failed rank waits for the others to fail alike
_TURN_SECONDS = 1.0  # ranks that fail without knowing of each other speak in turn; the first ends the others
_LAST_TURN = 16
_FORWARD_SECONDS = 0.2  # lets the launcher pass on the last words before it is told to end all ranks
_END_SECONDS = 10.0  # how long a rank with nothing to say waits to be ended


class PeerError(JobError):
    """Another rank has failed and says why; this one has nothing to add."""


class Job:
    """The ranks that one launcher has started, and what this one of them is doing."""

    def __init__(self, world: "MPI.Intracomm", stall_timeout: float) -> None:
        self.world = world
        self.rank: int = world.rank
        self.size: int = world.size
        self._control = world.Dup()  # its messages meet no others, whatever a failed rank was doing
        self.stop = StopRequest(self._control)
        self._watchdog = Watchdog(stall_timeout, self._end_from_watchdog)
        self._watchdog.start(launched=self.size > 1)

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

    def leave_together(self) -> None:
        """Wait until all ranks have come here. Raises `PeerError` if one has failed instead."""
        guilty = self._guilty_rank(claim=None)
        if guilty is not None:
            raise PeerError(f"rank {guilty} has failed")

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks with `error`, told once: by the lowest of the ranks that failed alike."""
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)
        # A launcher stops the others when one has failed: those that were only stopped leave it the last word.
        was_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
        claim = self.size + self.rank if was_stopped else self.rank
        if isinstance(error, PeerError) or self._guilty_rank(claim) != self.rank:
            time.sleep(_END_SECONDS)
        exit_code, message = _outcome(error, self._watchdog.phase)
        expected = isinstance(error, JobError | KeyboardInterrupt)
        self._say(message, None if expected else error)
        self._abort(exit_code)
        sys.exit(exit_code)

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
        patience = _PATIENCE_SECONDS + _TURN_SECONDS * min(self.rank, _LAST_TURN)
        deadline = float("inf") if claim is None else time.monotonic() + patience
        with self._watchdog.waiting():
            while not request.Test():
                if time.monotonic() > deadline:
                    return self.rank
                time.sleep(0.001)
        return int(lowest[0]) % self.size if lowest[0] < no_claim else None

    def _end_from_watchdog(self, message: str, delay: float) -> NoReturn:
        time.sleep(delay + _TURN_SECONDS * min(self.rank, _LAST_TURN))
        self._say(f"on {socket.gethostname()}: {message}")
        self._abort(StoppedError.exit_code)
        os._exit(StoppedError.exit_code)

    def _say(self, message: str, error: BaseException | None = None) -> None:
        """Print the last words, after the traceback of `error`."""
        with contextlib.suppress(OSError):  # that nobody reads its last words must not keep a rank alive
            sys.stdout.flush()
            if error is not None:
                traceback.print_exception(error)
            sys.stderr.write(f"mpi_tp: [rank {self.rank}/{self.size}] {' '.join(message.split())}\n")
            sys.stderr.flush()

    def _abort(self, exit_code: int) -> None:
        """End all ranks; returns if there is only this one."""
        if self.size > 1:
            time.sleep(_FORWARD_SECONDS)
            self.world.Abort(exit_code)


def run(main: Callable[[Job], int], stall_timeout: float = 300.0) -> NoReturn:
    """Start MPI, call `main(job)` on every rank and exit with what it returns.

    Whatever goes wrong on one rank ends all of them with one line on stderr: a `JobError` with its own exit code, a
    signal, or `stall_timeout` seconds without progress with 75, anything else with a traceback and 70.
    """
    job = _start(stall_timeout)
    try:
        _heed_signals()
        exit_code = main(job)
        job.leave_together()
    except BaseException as error:  # SystemExit too: it would leave the other ranks waiting
        job.fail(error)
    sys.exit(exit_code)


def join(stall_timeout: float = 300.0) -> Job:
    """Start MPI in a script that does without `run`; an exception that it does not catch ends all ranks likewise."""
    job = _start(stall_timeout)
    sys.excepthook = lambda _, error, __: job.fail(error)
    _heed_signals()
    return job


@contextmanager
def before_mpi() -> Iterator[None]:
    """Around what a program does before `run`: errors and help are printed once, by the launcher's rank 0."""
    with contextlib.ExitStack() as muted:
        speaks = launched_rank(os.environ) == 0
        if not speaks:
            silence = muted.enter_context(open(os.devnull, "w"))
            muted.enter_context(contextlib.redirect_stdout(silence))
            muted.enter_context(contextlib.redirect_stderr(silence))
        try:
            yield
        except (JobError, SystemExit) as error:
            exit_code = error.code if isinstance(error, SystemExit) else error.exit_code
            if isinstance(error, JobError):
                sys.stderr.write(f"mpi_tp: {' '.join(str(error).split())}\n")
            if not speaks and exit_code:
                time.sleep(_END_SECONDS)  # the launcher ends all ranks with the first: let that be the one that speaks
            sys.exit(exit_code)


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank by the launcher's own account, which is there before MPI is; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if name in environ:
            return int(environ[name])
    return 0


def check_launcher(world_size: int, environ: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` if the launcher started several processes, each of which is a world of its own.

    That happens without any error where the launcher is not the one of mpi4py's MPI.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if name == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environ:
            continue  # a batch script's own: the tasks it may start
        if name in environ:
            launched = int(environ[name])
            break
    else:
        return
    if launched > 1 and world_size == 1:
        raise ConfigurationError(
            f"the launcher started {launched} ranks ({name}), but MPI sees {world_size}: start with the mpirun of the "
            "MPI that mpi4py uses, or with srun --mpi=pmix (srun --mpi=list shows the choice)"
        )


def _start(stall_timeout: float) -> Job:
    with before_mpi():
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigurationError(
                f'mpi4py finds no MPI ({error}): load your site\'s MPI module, or pip install "mpi-tp[mpi]"'
            ) from error
        check_launcher(MPI.COMM_WORLD.size, os.environ)
    return Job(MPI.COMM_WORLD, stall_timeout)


def _heed_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for further in _STOPPING:  # the clean-up that follows is not to be interrupted again
        signal.signal(further, signal.SIG_IGN)
    raise StoppedError(f"stopped by {signal.Signals(number).name}: run the same command again")


def _outcome(error: BaseException, phase: str) -> tuple[int, str]:
    """Return the exit code and the last words for `error`."""
    if isinstance(error, JobError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return StoppedError.exit_code, "interrupted: run the same command again"
    name = f"on {socket.gethostname()} in phase {phase!r}: {type(error).__name__}"
    return JobError.exit_code, f"{name}: {error}" if str(error) else name
