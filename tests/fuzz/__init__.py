"""Damaged and hostile files, by the thousand: `python -m tests.fuzz` makes 10,000, the unit tests 200.

A subject makes one input from a seeded generator, gives it to the code that reads such files, and returns the outcome.
Whatever is no outcome (an exception of another kind, a message of two lines, other tensors than the source's) is a
finding, and so is a crash or a stall of the process. A finding is repeated with `--kind KIND --only INDEX`.
"""
