"""Whole programs, started as a user does."""
