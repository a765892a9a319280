"""A prompt on its way through the engine, and how its tokens are chosen."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mpi_tp.errors import UsageError

MAX_SAMPLES = 16_384
"""Of one prompt: a single one with millions would starve all the others."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one prompt are chosen.

    `temperature` 0 is greedy. `top_k` and `top_p` None keep the whole vocabulary. `n` samples are drawn, each with its
    own stream of random numbers from `seed`. Generation ends at an end-of-sequence token (unless `ignore_eos`), when
    the text holds one of `stop`, or after `max_new_tokens`. `logprobs` asks for the log-probability of each token.

    Raises UsageError for values out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no sampler could follow."""
        rules = (
            ("max_new_tokens", _is_count(self.max_new_tokens), "a whole number of at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k is None or _is_count(self.top_k), "a whole number of at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("n", _is_count(self.n) and self.n <= MAX_SAMPLES, f"a whole number from 1 to {MAX_SAMPLES}"),
            ("seed", isinstance(self.seed, int), "a whole number"),
            ("stop", _are_texts(self.stop), "a tuple of texts that are not empty"),
        )
        for name, holds, wanted in rules:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _are_texts(value: object) -> bool:
    """A single text is refused: as a sequence of texts it would be its letters."""
    return isinstance(value, tuple | list) and all(isinstance(text, str) and text for text in value)


SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True)
class Completion:
    """One sample: the text without stop string and special tokens, and every token with the end-of-sequence one.

    `logprobs` are those of `token_ids` under the raw logits, before temperature; None if not asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None = None


class RequestError(Exception):
    """One request cannot be served; the others can. `type` is the short name that its error record shows."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(type, message)  # both, or it could not be sent to the other ranks
        self.type = type

    def __str__(self) -> str:
        return str(self.args[1])
