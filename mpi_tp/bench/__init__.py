"""How fast it is here: `mpirun -np N python -m mpi_tp.bench …`, one file a measurement."""
