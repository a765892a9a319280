"""Faults against whole jobs, for minutes to hours: scripts outside continuous integration."""
