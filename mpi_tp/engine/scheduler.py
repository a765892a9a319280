"""Which tokens run in the next step. Pure Python on rank 0; the other ranks follow its plan."""

from collections import deque
from collections.abc import Iterable

from mpi_tp.engine.kv_cache import BlockPool, blocks_for
from mpi_tp.engine.sequence import Chunk, Sequence

MAX_STEP_TOKENS = 2048
"""A long prompt is run in chunks, so that a step's activations stay small and decoding goes on beside it."""


class Scheduler:
    """First come, first served: a sequence is admitted when the batch has a place and the cache all its blocks."""

    def __init__(self, pool: BlockPool, max_batch_size: int) -> None:
        self._pool = pool
        self._max_batch_size = max_batch_size
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """How many sequences have not been admitted yet."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self._waiting and not self._running

    def fits(self, max_length: int) -> bool:
        """Say whether a sequence of `max_length` tokens could ever be admitted."""
        return blocks_for(max_length) <= self._pool.num_blocks

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences, each of which must fit."""
        self._waiting.extend(sequences)

    def schedule(self) -> list[Chunk]:
        """Admit what fits and return the chunks of the step: decoding sequences first, prompts as room is left."""
        self._admit()
        chunks: list[Chunk] = []
        room = MAX_STEP_TOKENS
        for sequence in sorted(self._running, key=lambda sequence: len(sequence.tokens) - sequence.computed > 1):
            stop = min(len(sequence.tokens), sequence.computed + room)
            if stop > sequence.computed:
                chunks.append(Chunk(sequence, sequence.computed, stop))
                room -= stop - sequence.computed
        return chunks

    def retire_finished(self) -> list[Sequence]:
        """Take the finished sequences out of the batch, give back their blocks and return them."""
        finished = [sequence for sequence in self._running if sequence.is_finished]
        for sequence in finished:
            self._pool.give_back(sequence.blocks)
            sequence.blocks = []
        self._running = [sequence for sequence in self._running if not sequence.is_finished]
        return finished

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            blocks_needed = blocks_for(self._waiting[0].max_length)
            if blocks_needed > self._pool.num_free:
                return
            sequence = self._waiting.popleft()
            sequence.blocks = self._pool.take(blocks_needed)
            self._running.append(sequence)
