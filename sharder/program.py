"""What the sharder's programs share: exit codes, signals, and figures for people."""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from tqdm import tqdm

from mpi_tp.errors import JobError, StoppedError

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_program(main: Callable[[Sequence[str]], None]) -> int:
    """Run `main` with the command line's arguments and return the exit code.

    A JobError is one line on stderr, any other exception a traceback and 70. The signals that end a job become a
    StoppedError, so that half-written files are removed.
    """
    for number in _STOPPING:
        signal.signal(number, _stop)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends the program without a word
    try:
        main(sys.argv[1:])
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return JobError.exit_code
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    for further in _STOPPING:  # the clean-up that follows is not to be interrupted again
        signal.signal(further, signal.SIG_IGN)
    raise StoppedError(f"stopped by {signal.Signals(number).name}: run the same command again")


def megabytes(num_bytes: float) -> str:
    """Return a number of bytes as MB, for people."""
    return f"{num_bytes / 1e6:,.1f} MB"


def balance(rank_bytes: Sequence[int]) -> str:
    """Return how even the ranks are: the largest over the mean."""
    return f"{max(rank_bytes) * len(rank_bytes) / sum(rank_bytes):.3f}"


def progress(num_bytes: int, what: str) -> "tqdm[NoReturn]":
    """Return a progress bar over that many bytes; it shows on a terminal only."""
    return tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, disable=None)
