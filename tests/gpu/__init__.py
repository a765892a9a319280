"""Tests that need a GPU; also to be run under mpirun."""
