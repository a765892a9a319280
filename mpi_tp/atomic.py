"""Output files that are complete or absent."""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mpi_tp.errors import FileError

_TOKEN_BYTES = 4  # of a random name


@contextmanager
def write_errors(path: Path | None) -> Iterator[None]:
    """Turn what the operating system says about writing to `path` (None: standard output) into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {path or 'standard output'}: {error.strerror}") from error


def check_replaceable(path: Path) -> None:
    """Raise FileError if there is something at `path` that a new file must not replace."""
    with write_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise FileError(f"cannot write {path}: it is a device or a pipe, and this output must be a file")
        if path.exists():
            path.open("ab").close()  # a rename would not mind that the file is write-protected


def remove_leftovers(path: Path) -> None:
    """Remove what killed runs have left of `replacing(path)`; for who knows that no other run writes to it now."""
    target = Path(os.path.realpath(path))
    leftover = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.tmp")
    with write_errors(path):
        for file in target.parent.iterdir():
            if leftover.fullmatch(file.name):
                file.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends well, and that is gone if it does not.

    It grows in the same folder under another name. Raises FileError: at once if it cannot be made or would replace a
    device or a pipe, or at the end.
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")
    with write_errors(path):
        stream = temporary.open("xb")
    try:
        with _closing(stream):
            yield stream
            with write_errors(path):
                stream.flush()
                os.fsync(stream.fileno())
        with write_errors(path):
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _closing(stream: BinaryIO) -> Iterator[None]:
    """Close at the end, without a second error from what could not be written in the block."""
    try:
        yield
    finally:
        with suppress(OSError):
            stream.close()


@contextmanager
def open_output(path: Path | None) -> Iterator[BinaryIO]:
    """Open an output: None is standard output; a device or pipe is written to as it is, a file is replaced at the end.

    Raises FileError if it cannot be opened.
    """
    if path is None:
        yield sys.stdout.buffer
    elif os.path.exists(path) and not os.path.isfile(path):
        with write_errors(path):
            stream = path.open("wb")
        with _closing(stream):
            yield stream
    else:
        with replacing(path) as file:
            yield file
