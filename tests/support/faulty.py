"""A program in which one rank fails, as told: `python -m tests.support.faulty FAULT PHASE RANK ARGS…` (of infer).

Nothing in the product knows of it: the phases, the steps and MPI's end are wrapped from here.
"""

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi_tp import launch

FOREVER = 3600.0
MARK_VARIABLE = "FAULT_MARK"
"""The environment variable that names a file to be made when the fault comes."""
PHASES = {  # by the names in the table: the program's own, and how many steps of it come before the fault
    "load": ("loading", 2),
    "connect": ("connecting", 0),
    "prefill": ("generating", 0),
    "decode": ("generating", 2),
    "gather": ("gathering figures", 0),
    "write": ("writing the output", 0),
}


def _kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER)


def _exhaust_memory() -> None:
    import torch

    torch.empty(1 << 60, dtype=torch.uint8)


def _raise() -> None:
    raise ValueError("injected")


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": _raise,
    "SystemExit": lambda: sys.exit(0),
    "out of memory": _exhaust_memory,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "stall": lambda: time.sleep(FOREVER),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "mpirun killed": _kill_launcher,
}


class FaultyJob(launch.Job):
    """Meets the fault at one step of one phase."""

    fault: Callable[[], Any]
    at: tuple[str, int]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            self._meet()
            yield
        self._meet()

    def progress(self) -> None:
        super().progress()
        self._meet()

    def finish(self) -> None:
        if self.at[0] == "shutdown":
            self.fault()
        super().finish()

    def _meet(self) -> None:
        if (self.status.phase, self.status.step) == self.at:
            self.fault()


def _strike(fault: Callable[[], Any]) -> None:
    if MARK_VARIABLE in os.environ:
        Path(os.environ[MARK_VARIABLE]).touch()
    fault()


def _end_mpi_with(fault: Callable[[], Any], end_mpi: Callable[[], None]) -> Callable[[], None]:
    def end() -> None:
        fault()
        end_mpi()

    return end


def main() -> None:
    fault, phase, rank, *arguments = sys.argv[1:]
    if launch.launched_rank(os.environ) == int(rank):
        if phase == "start":
            _strike(FAULTS[fault])
        FaultyJob.fault = staticmethod(functools.partial(_strike, FAULTS[fault]))
        FaultyJob.at = PHASES.get(phase, (phase, 0))
        launch.Job = FaultyJob  # type: ignore[misc]
        if phase == "MPI_Finalize":
            launch.end_mpi = _end_mpi_with(FaultyJob.fault, launch.end_mpi)
    from mpi_tp.infer import main as infer

    infer(arguments)


if __name__ == "__main__":
    main()
