"""`python -m mpi_tp.doctor`: checks, under the launcher that a job will use, what the job stands on."""
