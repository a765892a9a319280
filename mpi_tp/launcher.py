"""What a launcher tells the processes that it starts, in variables that are there before MPI is."""

from collections.abc import Mapping

from mpi_tp.errors import ConfigurationError


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
