"""An output that survives its job: records go to a journal when they are finished, to the output file at the end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpi_tp.atomic import check_replaceable, remove_leftovers, replacing, write_errors
from mpi_tp.errors import ConfigurationError
from mpi_tp.records.journal import PROGRESS_LINES, Journal
from mpi_tp.records.keys import LineKeys
from mpi_tp.records.lines import JsonObject, Line
from mpi_tp.records.outputs import encode
from mpi_tp.records.tables import KeyTable, SpanList


def journal_path(output: Path) -> Path:
    """Return where the journal of an output lies."""
    return output.with_name(f"{output.name}.journal")


@dataclass(frozen=True)
class Earlier:
    """What earlier runs have left of an output: their records, by the keys of the lines that they answer."""

    output: Path
    journal: Journal
    found: KeyTable


@contextmanager
def open_earlier(output: Path, resume: bool, progress: Callable[[], None]) -> Iterator[Earlier]:
    """Open or make the journal of an output; it is removed when the block ends well.

    `progress` is called now and then while it is read. Raises ConfigurationError if it holds records and `resume` does
    not say what to do with them, FileError for what cannot be read or written, StoppedError if another run has it.
    """
    check_replaceable(output)
    with Journal.open(journal_path(output)) as journal:
        if journal.has_records() and not resume:
            raise ConfigurationError(
                f"{journal.path} holds records of an earlier run: go on with --resume, or remove it to start over"
            )
        remove_leftovers(output)
        with write_errors(output):
            found = KeyTable(output.parent, journal.num_lines())
            journal.recover(lambda entry: found.put(entry.key, entry.span), progress)
        yield Earlier(output, journal, found)
        journal.remove()


class ResumableWriter:
    """Writes records to a journal as they come; `finish` makes the output of them, in order.

    What it has to remember of each line is on disk, beside the output. One thread may read lines while another writes.
    """

    def __init__(self, earlier: Earlier, keys: LineKeys) -> None:
        self._earlier = earlier
        self._journal = earlier.journal
        self._keys = keys
        with write_errors(earlier.output):
            self._spans = SpanList(earlier.output.parent)
        self._num_lines = 0
        self.num_resumed = 0
        """How many of the lines so far had their records from earlier runs."""

    def pending(self, lines: Iterable[Line]) -> Iterator[tuple[int, Line]]:
        """Yield the lines that no earlier run has answered, each with its index among all. Raises FileError."""
        for index, line in enumerate(lines):
            self._num_lines = index + 1
            with write_errors(self._earlier.output):
                span = self._earlier.found.get(self._keys.of(line))
                if span:
                    self._spans.put(index, span)
                    self.num_resumed += 1
            if not span:
                yield index, line

    def write(self, index: int, record: JsonObject, line: Line) -> None:
        """Take the record of the line with this index, which has no other. Raises FileError, as for a full disk.

        A later run finds it by `line`: not if that is a BadLine made of a line that the engine has refused, which may
        be served under other circumstances.
        """
        span = self._journal.append(line.number, self._keys.of(line), encode(record))
        with write_errors(self._earlier.output):
            self._spans.put(index, span)

    def finish(self, progress: Callable[[], None]) -> None:
        """Write the output, once every line has its record; `progress` is called now and then. Raises FileError."""
        output = self._earlier.output
        with replacing(output) as stream:
            for index, span in enumerate(self._spans.first(self._num_lines)):
                assert span.length, f"line {index} has no record"
                record = self._journal.read(span)
                with write_errors(output):
                    stream.write(record + b"\n")
                if index % PROGRESS_LINES == 0:
                    progress()
