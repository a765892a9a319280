"""Which tokens run in the next step. Pure Python on rank 0; the other ranks follow its plan."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from mpi_tp.engine.block_pool import BlockPool, extend_digests
from mpi_tp.engine.kv_cache import BLOCK_SIZE, blocks_for
from mpi_tp.engine.sequence import Chunk, Sequence, no_blocks

STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens of a step by device: enough to keep it busy, few enough that decoding beside a long prompt goes on."""


class Scheduler:
    """First come, first served, with blocks of the cache on demand.

    A sequence is admitted when its tokens so far fit the cache; while it grows it takes a block when the last one is
    full. When there is none, the sequence admitted last loses its own and waits again, before all others: the oldest
    always gets on, and nobody is overtaken. What was lost is computed again as if it were prompt.
    """

    def __init__(self, pool: BlockPool, max_batch_size: int, max_step_tokens: int = STEP_TOKENS["cpu"]) -> None:
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        """How often a sequence has lost its blocks."""
        self.prefix_hit_tokens = 0
        """Tokens that need not be computed, because blocks in the cache held them already."""

    @property
    def num_waiting(self) -> int:
        """How many sequences wait to be admitted, or admitted again."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many sequences are admitted."""
        return len(self._running)

    @property
    def blocks_in_use(self) -> int:
        """How many blocks of the cache sequences hold."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._waiting and not self._running

    @property
    def capacity(self) -> int:
        """How many tokens the whole cache holds."""
        return self._pool.num_blocks * BLOCK_SIZE

    def fits(self, max_length: int) -> bool:
        """Say whether a sequence of `max_length` tokens could ever run to its end."""
        return blocks_for(max_length) <= self._pool.num_blocks

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, each of which must fit."""
        self._waiting.extend(sequences)

    def schedule(self) -> list[Chunk]:
        """Return the chunks of the step: decoding sequences first, then prompts as room is left, the new ones last.

        A sequence that runs up to its last token has another one, not known yet, when this returns.
        """
        chunks = self._decode()
        room = self._max_step_tokens - len(chunks)
        for sequence in self._running:
            if room and sequence.length - sequence.computed > 1:
                chunks.append(self._run(sequence, room))
                room -= chunks[-1].stop - chunks[-1].start
        while room and self._admit_next():
            chunks.append(self._run(self._running[-1], room))
            room -= chunks[-1].stop - chunks[-1].start
        return chunks

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out, finished or not, and give back their blocks."""
        gone = set(sequences)
        if any(len(sequence.blocks) == 0 for sequence in sequences):
            self._waiting = deque(sequence for sequence in self._waiting if sequence not in gone)
        self._running = [sequence for sequence in self._running if sequence not in gone]
        for sequence in sequences:
            self._release(sequence)

    def _decode(self) -> list[Chunk]:
        """Run every sequence that lacks its last token only."""
        chunks: list[Chunk] = []
        for sequence in self._running:  # which loses sequences at its end meanwhile, none that has been served
            start, length = sequence.computed, sequence.length
            if length - start > 1 or length == sequence.max_length:
                continue  # a prompt, or one whose last token is on its way
            if len(chunks) == self._max_step_tokens:
                break
            if start < len(sequence.blocks) * BLOCK_SIZE or self._grow(sequence):
                sequence.computed = length
                sequence.length = length + 1
                chunks.append(Chunk(sequence, start, length, True))
        return chunks

    def _run(self, sequence: Sequence, room: int) -> Chunk:
        """Run as much of a prompt as there is room for; its full blocks can be shared from here on.

        Even in this step: all its keys and values are written before any token attends to them.
        """
        start = sequence.computed
        stop = min(sequence.length, start + room)
        ends_sequence = stop == sequence.length
        sequence.computed = stop
        sequence.length += ends_sequence
        self._register(sequence, stop)
        return Chunk(sequence, start, stop, ends_sequence)

    def _admit_next(self) -> bool:
        """Admit the first that waits, if the batch and the cache have room for it."""
        if not self._waiting or len(self._running) == self._max_batch_size or self._waiting[0].awaits_token:
            return False
        sequence = self._waiting[0]
        num_shareable = (sequence.length - 1) // BLOCK_SIZE  # its last token must run, to give the next
        extend_digests(sequence.digests, sequence.tokens, num_shareable)
        shared = self._pool.find(sequence.digests[:num_shareable])
        num_new = blocks_for(sequence.length) - len(shared)
        # A block for each that runs is left over, or they would soon drive the new one out again.
        if num_new + len(self._running) > self._pool.num_free - self._pool.num_free_among(shared):
            return False
        self._pool.share(shared)
        sequence.blocks = np.array(shared + [self._pool.take() for _ in range(num_new)], np.int32)
        sequence.num_registered = len(shared)
        sequence.computed = len(shared) * BLOCK_SIZE
        self.prefix_hit_tokens += sequence.computed
        self._running.append(self._waiting.popleft())
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Give a running sequence one more block; say whether it is still running."""
        self._register(sequence, sequence.computed)
        while self._pool.num_free == 0:
            last = self._running.pop()
            self._release(last)
            self._waiting.appendleft(last)
            self.num_preemptions += 1
            if last is sequence:
                return False
        sequence.blocks = np.concatenate((sequence.blocks, [self._pool.take()]), dtype=np.int32)
        return True

    def _register(self, sequence: Sequence, num_tokens: int) -> None:
        """Tell the pool what the blocks hold that the first `num_tokens`, known and computed, fill."""
        num_full = num_tokens // BLOCK_SIZE
        extend_digests(sequence.digests, sequence.tokens, num_full)
        for index in range(sequence.num_registered, num_full):
            self._pool.register(int(sequence.blocks[index]), sequence.digests[index])
        sequence.num_registered = num_full

    def _release(self, sequence: Sequence) -> None:
        self._register(sequence, min(sequence.computed, len(sequence.tokens)))
        self._pool.release(sequence.blocks.tolist())
        sequence.blocks = no_blocks()
        sequence.computed = 0
