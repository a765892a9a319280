"""A prompt in any of its forms to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpi_tp.engine.request import RequestError
from mpi_tp.errors import ConfigurationError
from mpi_tp.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's token ids.

    Raises RequestError if it needs a tokenizer or chat template that the model does not have, or the template refuses.
    """
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return [token for token in prompt if isinstance(token, int)]
    if tokenizer is None:
        raise RequestError("no_tokenizer", "the shard set has no tokenizer: give prompt_token_ids")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        return tokenizer.encode_chat([message for message in prompt if isinstance(message, Mapping)])
    except (ConfigurationError, ValueError) as error:
        raise RequestError("invalid_prompt", str(error)) from error
