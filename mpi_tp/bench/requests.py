"""Prompts of random tokens for the engine."""

import random

from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.request import RequestError, SamplingParams
from mpi_tp.errors import ConfigurationError


def random_prompt(generator: random.Random, length: int, vocab_size: int) -> list[int]:
    """Return `length` token ids."""
    return [generator.randrange(vocab_size) for _ in range(length)]


def submit(engine: ServingEngine, key: int, prompt: list[int], max_new_tokens: int) -> None:
    """Queue a prompt that is answered with exactly so many tokens.

    Raises ConfigurationError if the engine cannot take it.
    """
    try:
        engine.submit(key, prompt, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
    except RequestError as error:
        raise ConfigurationError(
            f"a prompt of {len(prompt)} tokens and an answer of {max_new_tokens} cannot be served: {error}"
        ) from error
