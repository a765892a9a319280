"""What can go wrong, by the exit code that the job ends with.

A message says what is wrong, both values, and what to do; programs print it as one line, without a traceback.
"""

MAX_LENGTH = 4000
"""Characters of a message; the middle of a longer one, which quotes a file, is left out."""


class JobError(Exception):
    """Any failure that ends the job; as raised itself, an internal one."""

    exit_code = 70

    def __str__(self) -> str:
        """The message as one line; what it quotes from a file can neither break the line nor steer a terminal."""
        text = super().__str__()
        if not text.isprintable():
            text = "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)
        return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]} … {text[-MAX_LENGTH // 2 :]}"


def _escaped(letter: str) -> str:
    return " " if letter.isspace() else letter.encode("unicode_escape").decode()


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
