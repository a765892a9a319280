"""A sequence of tokens that grows, and the stretch of it that runs in one step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpi_tp.engine.request import FinishReason, SamplingParams
from mpi_tp.engine.text_stream import TextStream
from mpi_tp.engine.uniform_stream import UniformStream


def no_blocks() -> NDArray[np.int32]:
    """Return the blocks of a sequence that is not admitted."""
    return np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of the request `key`: the prompt's tokens, then the generated ones.

    `max_length` bounds prompt and answer together. `uniforms` are its random numbers, None if it is greedy.
    """

    params: SamplingParams
    sample: int
    tokens: list[int]
    """Those that are known."""
    prompt_length: int
    max_length: int
    key: Any = None
    text: TextStream = field(default_factory=TextStream)
    length: int = field(init=False)
    """Number of tokens, with one that a step in flight is about to give."""
    row: int = -1
    """Which row of its step gives that token."""
    computed: int = 0
    """The first so many tokens have their keys and values in the cache, at the latest when the last step has run."""
    blocks: NDArray[np.int32] = field(default_factory=no_blocks)
    """The blocks of the cache, in order."""
    digests: list[bytes] = field(default_factory=list)
    """What the first blocks hold, as far as it has been computed."""
    num_registered: int = 0
    """The first so many blocks are known to the pool by their content."""
    uniforms: UniformStream | None = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: str | None = None
    is_finished: bool = False
    """Whether no further token is wanted."""

    def __post_init__(self) -> None:
        """Derive the rest."""
        self.length = len(self.tokens)
        self.uniforms = UniformStream(self.params.seed, self.sample) if self.params.temperature else None

    @property
    def awaits_token(self) -> bool:
        """Whether a step in flight gives it a token."""
        return self.length > len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """The known tokens after the prompt."""
        return self.tokens[self.prompt_length :]


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a sequence, to be run in this step."""

    sequence: Sequence
    start: int
    stop: int
    ends_sequence: bool
    """Whether the step gives the sequence its next token."""
