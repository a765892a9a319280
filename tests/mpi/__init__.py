"""Tests that run on every rank under mpirun."""
