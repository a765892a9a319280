"""The random numbers of one sample: each a function of seed, sample and position, and of nothing else.

They come from a counter-based generator (Philox; Salmon et al., 2011) whose counter is the position, so neither the
batch nor a restart changes them.
"""

import numpy as np

MASK_64 = 2**64 - 1
WORDS_PER_COUNT = 4
"""Philox gives four words of 64 bits for each value of its counter."""
DRAWN_AT_ONCE = 64


class UniformStream:
    """Uniform random numbers in [0, 1), drawn for some positions ahead."""

    def __init__(self, seed: int, sample: int) -> None:
        self._key = (seed & MASK_64, sample)
        self._start = 0
        self._drawn: list[float] = []

    def at(self, position: int) -> float:
        """Return the number of a position."""
        index = position - self._start
        if not 0 <= index < len(self._drawn):
            self._draw(position)
            index = 0
        return self._drawn[index]

    def _draw(self, start: int) -> None:
        generator = np.random.Philox(key=np.array(self._key, np.uint64), counter=start)
        words = generator.random_raw(DRAWN_AT_ONCE * WORDS_PER_COUNT)[::WORDS_PER_COUNT]
        self._start = start
        self._drawn = ((words >> np.uint64(11)) * 2.0**-53).tolist()
