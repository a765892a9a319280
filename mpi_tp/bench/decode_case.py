"""How a batch comes to decode at a wanted context, through an engine that decides itself what runs when."""

from dataclasses import dataclass

from mpi_tp.bench.settings import WARM_UP_STEPS
from mpi_tp.engine.kv_cache import blocks_for
from mpi_tp.errors import ConfigurationError

PROFILED_STEPS = 5
"""After those that count, under torch's profiler."""
SPARE_STEPS = 4
"""A sequence must not end before the last step that counts, with steps in flight behind it."""


@dataclass(frozen=True)
class DecodeCase:
    """One batch size, and how it comes to the wanted context.

    Prompts run in steps of so many tokens, beside which those that are through already decode: on average, each has
    half of these steps' tokens more when the last is through.
    """

    batch_size: int
    prompt_length: int
    prompt_steps: int
    steps: int

    @classmethod
    def plan(cls, batch_size: int, context: int, steps: int, step_tokens: int) -> "DecodeCase":
        """Choose prompts so that the mean context of the steps that count is `context`; a step has up to `step_tokens`.

        Raises ConfigurationError if a step cannot hold the batch.
        """
        if batch_size >= step_tokens:
            raise ConfigurationError(
                f"batch size {batch_size} leaves a step of {step_tokens} tokens no room for prompts: lower it"
            )
        room = step_tokens - batch_size
        length = (context - WARM_UP_STEPS - steps // 2) / (1 + batch_size / (2 * room))
        prompt_length = max(1, round(length))
        return cls(batch_size, prompt_length, -(-batch_size * prompt_length // room), steps)

    @property
    def max_new_tokens(self) -> int:
        """What each sequence may generate: enough for all steps."""
        return self.prompt_steps + WARM_UP_STEPS + self.steps + PROFILED_STEPS + SPARE_STEPS

    @property
    def max_length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_length + self.max_new_tokens

    def check_context(self, context_length: int) -> None:
        """Raise ConfigurationError if a sequence outgrows the model's context."""
        if self.max_length > context_length:
            raise ConfigurationError(
                f"--context and --steps take {self.max_length} tokens at batch size {self.batch_size} and the model's "
                f"context holds {context_length}: lower them"
            )

    def check_cache(self, num_blocks: int) -> None:
        """Raise ConfigurationError if the sequences do not fit into the cache."""
        wanted = self.batch_size * blocks_for(self.max_length)
        if wanted > num_blocks:
            raise ConfigurationError(
                f"batch size {self.batch_size} takes {wanted} blocks of key/value cache and there are {num_blocks}: "
                "raise --kv-memory, or lower --batch-sizes, --context or --steps"
            )
