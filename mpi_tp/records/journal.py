"""The journal of a batch: finished records in an append-only file, safe from the death of the job.

    {"journal of": "mpi_tp.infer", "version": 1}
    {"line": 7, "key": "<32 hex digits>", "sum": "<16 hex digits>", "record": {…}}

An entry is one line: the number of the input line, its key (`mpi_tp.records.keys`), the xxh3-64 checksum of both and
the record, and the record as it goes to the output. Entries stand in the order in which they were finished. A last line
without its end was torn by a death and is cut off; any other line that is no whole entry is damaged and passed over.
"""

import errno
import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mpi_tp.atomic import write_errors
from mpi_tp.errors import FileError, StoppedError
from mpi_tp.records.keys import KEY_BYTES
from mpi_tp.records.sync import Syncer
from mpi_tp.records.tables import Span

HEADER = b'{"journal of": "mpi_tp.infer", "version": 1}\n'
LOCK_SECONDS = 5.0
"""How long a run waits for the one before it, whose ranks may take a moment to end."""

PROGRESS_LINES = 10_000
"""How many lines are read or written between two signs of life."""

_ENTRY = re.compile(
    rb'\{"line": (\d+), "key": "([0-9a-f]{%d})", "sum": "([0-9a-f]{16})", "record": (.*)\}\n' % (2 * KEY_BYTES)
)
_CHUNK_BYTES = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Entry:
    """A record in a journal: the key of its line, and where its bytes lie."""

    key: bytes
    span: Span


class Journal:
    """An open journal, which no other run can open meanwhile; for one thread."""

    def __init__(self, path: Path, descriptor: int, syncer: Syncer) -> None:
        self.path = path
        self._descriptor = descriptor
        self._syncer = syncer
        self._end = 0

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["Journal"]:
        """Open or make a journal and lock it; `recover` reads what is in it, and has to be called first.

        Raises FileError if it cannot be opened or, when the block ends, written; StoppedError if another run has it.
        """
        descriptor = _open_locked(path)
        try:
            with Syncer(descriptor) as syncer:
                yield cls(path, descriptor, syncer)
            with write_errors(path):
                syncer.check()
        finally:
            os.close(descriptor)

    def has_records(self) -> bool:
        """Return whether it holds an entry. Raises FileError if it is something else than a journal."""
        if any(entry for _, _, entry in self._lines()):
            return True
        if not HEADER.startswith(self._read(0, len(HEADER))):
            raise FileError(f"{self.path} is no journal of a batch: move it, or choose another --output")
        return False

    def num_lines(self) -> int:
        """Return a bound on the number of entries."""
        chunks = range(0, os.fstat(self._descriptor).st_size, _CHUNK_BYTES)
        return sum(self._read(start, _CHUNK_BYTES).count(b"\n") for start in chunks)

    def recover(self, found: Callable[[Entry], None], progress: Callable[[], None]) -> None:
        """Call `found` for each entry, cut off a torn last line, and say so if lines are damaged.

        `progress` is called now and then. Raises FileError if it cannot be read or repaired.
        """
        damaged: list[int] = []
        for number, (end, raw, entry) in enumerate(self._lines(), 1):
            if number % PROGRESS_LINES == 0:
                progress()
            if raw.endswith(b"\n"):
                self._end = end
            if entry:
                found(entry)
            elif raw.endswith(b"\n") and raw != HEADER:
                damaged.append(number)
        if damaged:
            print(
                f"mpi_tp: {self.path}: {len(damaged)} damaged lines, the first is line {damaged[0]}: "
                "what they answered is served again",
                file=sys.stderr,
            )
        with write_errors(self.path):
            os.ftruncate(self._descriptor, self._end)
            if self._end == 0:
                self._write(HEADER)

    def append(self, line_number: int, key: bytes, record: bytes) -> Span:
        """Add the record of an input line and return where its bytes lie. Raises FileError, as for a full disk."""
        head = b'{"line": %d, "key": "%s", "sum": "%s", "record": ' % (
            line_number,
            key.hex().encode(),
            _checksum(b"%d" % line_number, key.hex().encode(), record),
        )
        span = Span(self._end + len(head), len(record))
        with write_errors(self.path):
            self._write(head + record + b"}\n")
        return span

    def read(self, span: Span) -> bytes:
        """Return the bytes of a record. Raises FileError."""
        return self._read(*span)

    def remove(self) -> None:
        """Remove the file, which nobody needs any more. Raises FileError."""
        with write_errors(self.path):
            self.path.unlink()

    def _lines(self) -> Iterator[tuple[int, bytes, Entry | None]]:
        """Yield each line's end in the file, its bytes, and the entry that it is, if it is one."""
        end = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for raw in file:
                yield end + len(raw), raw, _parse(raw, end)
                end += len(raw)

    def _read(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise FileError(f"cannot read {self.path}: {error.strerror}") from error

    def _write(self, data: bytes) -> None:
        """Append `data`, all or nothing of it."""
        self._syncer.check()
        rest = data
        try:
            while rest:
                rest = rest[os.pwrite(self._descriptor, rest, self._end + len(data) - len(rest)) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)
        self._syncer.note_write()


def _parse(raw: bytes, offset: int) -> Entry | None:
    """Return the entry in a line that begins at `offset`, None if it is no whole one."""
    match = _ENTRY.fullmatch(raw)
    if not match or match[3] != _checksum(match[1], match[2], match[4]):
        return None
    return Entry(bytes.fromhex(match[2].decode()), Span(offset + match.start(4), len(match[4])))


def _checksum(line_number: bytes, key: bytes, record: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(b"%s %s %s" % (line_number, key, record)).encode()


def _open_locked(path: Path) -> int:
    """Return a descriptor of the file that has this name once it is locked: the run before may have removed it."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with write_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _lock(descriptor, path) and _has_name(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise StoppedError(f"{path} is locked: another run writes this output; wait for its end, or stop it")
        time.sleep(0.1)


def _lock(descriptor: int, path: Path) -> bool:
    """Try to lock the file; where the file system has no locks, say so and go on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise FileError(f"cannot lock {path}: {error.strerror}") from error
        print(f"mpi_tp: cannot lock {path} ({error.strerror}): let no other run write this output", file=sys.stderr)
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
