"""MPI-launched tensor-parallel inference from per-rank HDF5 shard files."""

__version__ = "0.1.0"
