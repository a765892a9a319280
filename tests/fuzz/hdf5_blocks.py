"""HDF5's own checksums over its metadata, made right again after a change, so that the code behind them is reached."""

import re

import numba
import numpy as np

_SIGNATURE = re.compile(rb"\x89HDF\r\n\x1a\n|OHDR|OCHK|FRHP|BTHD|BTLF|BTIN")
_MAX_BLOCK = 8192

Block = tuple[int, int]
"""A block of metadata: its first byte, and where the four bytes of its checksum begin."""


def find_blocks(data: bytes) -> list[Block]:
    """Return the blocks of a sound file, each found by the place where its checksum is right."""
    array = np.frombuffer(data, np.uint8)
    ends = ((match.start(), _end(array, match.start())) for match in _SIGNATURE.finditer(data))
    return [(start, end) for start, end in ends if end]


def mend(data: bytearray, blocks: list[Block]) -> bytes:
    """Return the bytes, which are changed too, with every block's checksum computed anew."""
    for start, end in blocks:
        data[end : end + 4] = int(_lookup3(np.frombuffer(data[start:end], np.uint8))).to_bytes(4, "little")
    return bytes(data)


@numba.njit
def _end(data: np.ndarray, start: int) -> int:  # type: ignore[no-untyped-def]
    for end in range(start + 8, min(len(data) - 4, start + _MAX_BLOCK)):
        stored = data[end] | data[end + 1] << 8 | data[end + 2] << 16 | data[end + 3] << 24
        if stored == _lookup3(data[start:end]):
            return end
    return 0


@numba.njit
def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF


@numba.njit
def _word(data: np.ndarray, at: int) -> int:
    """Four bytes as a little-endian number; those behind the end are 0."""
    value = 0
    for index in range(4):
        if at + index < len(data):
            value |= int(data[at + index]) << (8 * index)
    return value


@numba.njit
def _lookup3(data: np.ndarray) -> int:
    """Bob Jenkins' lookup3 (hashlittle) with initial value 0, as HDF5 takes it."""
    mask = 0xFFFFFFFF
    a = b = c = (0xDEADBEEF + len(data)) & mask
    at, left = 0, len(data)
    while left > 12:
        a, b, c = (a + _word(data, at)) & mask, (b + _word(data, at + 4)) & mask, (c + _word(data, at + 8)) & mask
        a = ((a - c) & mask) ^ _rotate(c, 4)
        c = (c + b) & mask
        b = ((b - a) & mask) ^ _rotate(a, 6)
        a = (a + c) & mask
        c = ((c - b) & mask) ^ _rotate(b, 8)
        b = (b + a) & mask
        a = ((a - c) & mask) ^ _rotate(c, 16)
        c = (c + b) & mask
        b = ((b - a) & mask) ^ _rotate(a, 19)
        a = (a + c) & mask
        c = ((c - b) & mask) ^ _rotate(b, 4)
        b = (b + a) & mask
        at, left = at + 12, left - 12
    if left == 0:
        return c
    a, b, c = (a + _word(data, at)) & mask, (b + _word(data, at + 4)) & mask, (c + _word(data, at + 8)) & mask
    c = ((c ^ b) - _rotate(b, 14)) & mask
    a = ((a ^ c) - _rotate(c, 11)) & mask
    b = ((b ^ a) - _rotate(a, 25)) & mask
    c = ((c ^ b) - _rotate(b, 16)) & mask
    a = ((a ^ c) - _rotate(c, 4)) & mask
    b = ((b ^ a) - _rotate(a, 14)) & mask
    return ((c ^ b) - _rotate(b, 24)) & mask
