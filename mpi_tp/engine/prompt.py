"""A prompt in any of its forms to token ids."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from mpi_tp.engine.request import RequestError
from mpi_tp.errors import ConfigurationError
from mpi_tp.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text, chat messages ({"role", "content"}), or token ids."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, context_length: int) -> list[int]:
    """Return the prompt's token ids.

    Raises RequestError if it has none of these forms, needs a tokenizer or chat template that the model does not have,
    the template refuses it, or it is by far too long for a context of `context_length` tokens.
    """
    if not isinstance(prompt, Iterable):
        raise RequestError("invalid_prompt", f"a prompt is text, messages or token ids, not {type(prompt).__name__}")
    if not isinstance(prompt, str) and all(isinstance(token, Integral) for token in prompt):
        return [int(token) for token in cast(Sequence[int], prompt)]
    if tokenizer is None:
        raise RequestError("no_tokenizer", "the shard set has no tokenizer: give prompt_token_ids")
    texts = [prompt] if isinstance(prompt, str) else [str(message) for message in prompt]
    longest = max(texts, key=len, default="")
    if tokenizer.is_surely_longer(longest, context_length):
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {len(longest)} characters, more than a context of {context_length} tokens can hold",
        )
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not all(isinstance(message, Mapping) for message in prompt):
        raise RequestError("invalid_prompt", "a prompt must be text, a list of messages or a list of token ids")
    try:
        return tokenizer.encode_chat(cast(Sequence[Mapping[str, Any]], prompt))
    except (ConfigurationError, ValueError) as error:
        raise RequestError("invalid_prompt", str(error)) from error
