"""Parallel layers: each holds this rank's part of its weights; its collectives stand in its `__call__`."""
