"""A sequence of tokens that grows, and the stretch of it that runs in one step."""

from dataclasses import dataclass, field
from typing import Any

from mpi_tp.engine.request import FinishReason, SamplingParams
from mpi_tp.engine.stop import StopWatcher


@dataclass
class Sequence:
    """One sample of the request `key`: the prompt's tokens, then the generated ones.

    `max_length` bounds prompt and answer together. The first `computed` tokens have their keys and values in `blocks`.
    `stopped_text` is what stands before a stop string.
    """

    params: SamplingParams
    sample: int
    tokens: list[int]
    prompt_length: int
    max_length: int
    key: Any = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_watcher: StopWatcher | None = None
    stopped_text: str | None = None
    failure: str | None = None

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def is_finished(self) -> bool:
        """Whether no further token is wanted."""
        return self.finish_reason is not None or self.failure is not None


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of a sequence, to be run in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def ends_sequence(self) -> bool:
        """Whether the step gives the sequence its next token."""
        return self.stop == len(self.sequence.tokens)
