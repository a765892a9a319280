"""Offline: cuts a checkpoint into one HDF5 shard file per rank. Needs no MPI and no GPU."""
