"""Where records lie in a journal, kept in files without a name: tables that grow with the input, but not in memory.

They are read and written at offsets and not mapped, so that their pages count as the system's cache and not as ours.
"""

import io
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpi_tp.records.keys import KEY_BYTES

_SPAN = struct.Struct("<QQ")
_SLOT_BYTES = KEY_BYTES + _SPAN.size
_READ_SPANS = 4096


class Span(NamedTuple):
    """Bytes of a file; a length of 0 stands for none."""

    offset: int
    length: int


class SpanList:
    """A span for each index 0, 1, 2 …, set in any order, by several threads."""

    def __init__(self, folder: Path) -> None:
        self._file = _unnamed_file(folder)

    def put(self, index: int, span: Span) -> None:
        """Set the span of an index. Raises OSError, for example for a full disk."""
        _write(self._file.fileno(), _SPAN.pack(*span), index * _SPAN.size)

    def first(self, count: int) -> Iterator[Span]:
        """Yield the spans of the indices below `count`; every one must have been set."""
        for start in range(0, count, _READ_SPANS):
            num_bytes = min(_READ_SPANS, count - start) * _SPAN.size
            block = os.pread(self._file.fileno(), num_bytes, start * _SPAN.size)
            assert len(block) == num_bytes, f"the span of an index from {start} on was never set"
            yield from map(Span._make, _SPAN.iter_unpack(block))


class KeyTable:
    """Spans by key: a hash table of open addressing, at most half full. Keys must be evenly spread, as digests are."""

    def __init__(self, folder: Path, max_keys: int) -> None:
        self._mask = (1 << (2 * max_keys).bit_length()) - 1
        self._file = _unnamed_file(folder)
        self._file.truncate((self._mask + 1) * _SLOT_BYTES)

    def put(self, key: bytes, span: Span) -> None:
        """Set the span of a key. Raises OSError, for example for a full disk."""
        slot, _ = self._find(key)
        _write(self._file.fileno(), key + _SPAN.pack(*span), slot * _SLOT_BYTES)

    def get(self, key: bytes) -> Span | None:
        """Return the span that was last put under a key."""
        _, span = self._find(key)
        return span if span.length else None

    def _find(self, key: bytes) -> tuple[int, Span]:
        """Return the slot that holds `key`, or the empty one where it belongs, and the span in it."""
        slot = int.from_bytes(key[:8], "little") & self._mask
        while True:
            content = os.pread(self._file.fileno(), _SLOT_BYTES, slot * _SLOT_BYTES)
            span = Span._make(_SPAN.unpack_from(content, KEY_BYTES))
            if not span.length or content.startswith(key):
                return slot, span
            slot = (slot + 1) & self._mask


def _unnamed_file(folder: Path) -> io.FileIO:
    """Return a new file that is gone with the last reference to it."""
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return io.FileIO(descriptor, "r+b")


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`; a full disk takes a part first and refuses the rest."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
