"""What can go wrong, by the exit code that the job ends with.

A message says what is wrong, both values, and what to do; programs print it as one line, without a traceback.
"""


class JobError(Exception):
    """Any failure that ends the job; as raised itself, an internal one."""

    exit_code = 70


class UsageError(JobError, ValueError):
    """The command line or the configuration file asks for something that makes no sense."""

    exit_code = 2


class FileError(JobError):
    """A file is missing, cannot be read or written, or is damaged."""

    exit_code = 74


class StoppedError(JobError):
    """The job stopped early and is worth trying again: a signal, a lost rank, a stall."""

    exit_code = 75


class ConfigurationError(JobError, ValueError):
    """Rank count, devices, model, format or memory do not fit together."""

    exit_code = 78
