"""What the doctor prints: a row a check."""

from dataclasses import dataclass
from typing import Literal, TextIO

from mpi_tp.errors import ConfigurationError

Status = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Row:
    """What a check has found, with what to do about it; `details` are further lines, of a table."""

    status: Status
    text: str
    details: tuple[str, ...] = ()


def ok(text: str, *details: str) -> Row:
    """Return a row for what is as it should be."""
    return Row("ok", text, details)


def warning(text: str, *details: str) -> Row:
    """Return a row for what works, but slowly or not for long."""
    return Row("warning", text, details)


def failure(text: str) -> Row:
    """Return a row for what ends a job."""
    return Row("failure", text)


def skipped(text: str) -> Row:
    """Return a row for what cannot be checked here."""
    return Row("skipped", text)


class Report:
    """Prints each row as it comes, and the failures again at the end; without a stream it only counts."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._rows: list[tuple[str, Row]] = []

    def add(self, name: str, row: Row) -> None:
        """Print the row of the check `name`."""
        self._rows.append((name, row))
        self._print(_lines(name, row))

    def close(self) -> int:
        """Print the failures, unless they are what was printed last, and return the exit code."""
        failed = [(name, row) for name, row in self._rows if row.status == "failure"]
        if not failed:
            return 0
        self._print(["", f"{len(failed)} of {len(self._rows)} checks failed"])
        if failed != self._rows[-len(failed) :]:
            for name, row in failed:
                self._print(_lines(name, row))
        return ConfigurationError.exit_code

    def _print(self, lines: list[str]) -> None:
        if self._stream:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()


def _lines(name: str, row: Row) -> list[str]:
    first = f"{row.status:8} {name:14} {' '.join(row.text.split())}"
    return [first, *(f"{'':23} {line}" for line in row.details)]
