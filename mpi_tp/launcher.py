"""Launchers: what they tell the processes that they start, before there is MPI, and what they need to end."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mpi_tp.errors import ConfigurationError

_HANGING_LAUNCHERS = ("prterun", "prted")
_BURIAL_SECONDS = 15


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank by the launcher's own account; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if name in environ:
            return int(environ[name])
    return 0


def launched_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks by the launcher's own account and the variable that tells it; 1 without a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if name == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environ:
            continue  # a batch script's own: the tasks it may start
        if name in environ:
            return int(environ[name]), name
    return 1, ""


def check_launcher(world_size: int, environ: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` if the launcher started several processes, each of which is a world of its own.

    That happens without any error where the launcher is not the one of mpi4py's MPI.
    """
    launched, name = launched_size(environ)
    if launched > 1 and world_size == 1:
        raise ConfigurationError(
            f"the launcher started {launched} ranks ({name}), but MPI sees {world_size}: start with the mpirun of the "
            "MPI that mpi4py uses, or with srun --mpi=pmix (srun --mpi=list shows the choice)"
        )


def see_launcher_end() -> None:
    """Leave a process that kills the launcher if it lives on; for a rank that ends before MPI has started.

    Open MPI's, whose ranks have all ended while one was starting MPI, now and then waits for itself for ever.
    """
    launcher = os.getppid()
    if Path(f"/proc/{launcher}/comm").read_text().strip() not in _HANGING_LAUNCHERS:
        return
    nowhere = subprocess.DEVNULL
    command = ["sh", "-c", f"sleep {_BURIAL_SECONDS}; kill -KILL {launcher}"]
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
