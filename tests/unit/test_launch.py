"""What the launcher's variables tell before MPI does."""

import pytest

from mpi_tp.errors import ConfigurationError
from mpi_tp.launcher import check_launcher, launched_rank


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, "PMI_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_several_processes_with_a_world_each_are_noticed(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"started 4 ranks \({named}\), but MPI sees 1: .*mpirun.*srun"):
        check_launcher(1, environ)


@pytest.mark.parametrize(
    ("world_size", "environ"),
    [
        (1, {}),
        (4, {"OMPI_COMM_WORLD_SIZE": "4"}),
        (1, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}),  # mpirun -np 1 over srun's daemons
        (1, {"SLURM_NTASKS": "4"}),  # in a batch script, without a launcher
        (1, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"}),  # salloc's shell
    ],
)
def test_worlds_that_are_meant_pass(world_size: int, environ: dict[str, str]) -> None:
    check_launcher(world_size, environ)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}, 3),
        ({"PMI_RANK": "2", "SLURM_PROCID": "0"}, 2),
        ({"SLURM_PROCID": "1"}, 1),
    ],
)
def test_the_nearest_launcher_tells_the_rank(environ: dict[str, str], rank: int) -> None:
    assert launched_rank(environ) == rank
