"""Which blocks of the key/value cache are in use, and what those hold that could serve again. Rank 0's alone.

A block of a sequence is worth keeping once it is full: its keys and values are a function of its tokens and of all
those before them. A digest over both identifies it, so sequences with a common beginning share blocks, and a block
that nobody uses any more keeps its content until it is taken for another.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from mpi_tp.engine.kv_cache import BLOCK_SIZE


def extend_digests(digests: list[bytes], tokens: list[int], num_blocks: int) -> None:
    """Append the digests of the blocks of `tokens` up to `num_blocks`, all of which must be full.

    A cryptographic hash, since two contents under one digest would give a wrong answer unseen.
    """
    for index in range(len(digests), num_blocks):
        content = array("q", tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        assert len(content) == BLOCK_SIZE, f"block {index} holds {len(content)} tokens"
        parent = digests[-1] if digests else b""
        digests.append(hashlib.sha256(parent + content.tobytes()).digest())


class BlockPool:
    """Blocks by number, each with the count of its users; those without are free, the longest unused taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free, with known content; the longest unused first
        self._digests: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many blocks can be taken."""
        return len(self._blank) + len(self._reusable)

    def take(self) -> int:
        """Return a block, of which one must be free."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            del self._blocks[self._digests.pop(block)]
        self._users[block] = 1
        return block

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold a chain of contents, as far as it is known."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks have no user now."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks that `find` returned."""
        for block in blocks:
            if self._users[block] == 0:
                del self._reusable[block]
            self._users[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Note what a block in use holds from now on; of two with the same content the first is found."""
        if digest not in self._blocks:
            assert block not in self._digests, f"block {block} has a content already"
            self._blocks[digest] = block
            self._digests[block] = digest

    def release(self, blocks: list[int]) -> None:
        """Take a user off each block of a chain. Its end is reused first: without its beginning it is not found."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} was released once too often"
            if self._users[block] > 0:
                continue
            if block in self._digests:
                self._reusable[block] = None
            else:
                self._blank.append(block)
