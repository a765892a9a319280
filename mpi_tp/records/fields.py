"""The fields of an input line: each is read as the type that it must have, or refused by name with a LineError."""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import UsageError
from mpi_tp.records.lines import JsonObject, LineError, Message

ROLES = ("system", "developer", "user", "assistant", "tool")

# Options of other servers that would change the result and that we do not have, with the values that change nothing.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def refuse_unsupported(name: str, value: object) -> None:
    """Raise LineError for an option that would change the result and that we cannot follow."""
    if value is not None and value not in NEUTRAL_VALUES.get(name, ()):
        raise LineError("unsupported_option", f"{name} is not supported: leave it out of the line")


def _wrong_type(name: str, value: object, wanted: str) -> LineError:
    return LineError("invalid_option", f"{name} is {reprlib.repr(value)}: it must be {wanted}")


def whole_number(name: str, value: object) -> int:
    """Read an integer of 64 bits; 64.0 is one too, as tables with gaps turn whole columns into such numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -(2**63) <= value < 2**63:
        raise _wrong_type(name, value, "a whole number of at most 64 bits")
    if value != int(value):
        raise _wrong_type(name, value, "a whole number")
    return int(value)


def number(name: str, value: object) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**63:
        raise _wrong_type(name, value, "a number")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def text(name: str, value: object, type: str = "invalid_prompt") -> str:
    """Read a text; half of a surrogate pair, which JSON can spell but no tokenizer can read, is refused."""
    if not isinstance(value, str):
        raise LineError(type, f"{name} is {reprlib.repr(value)}: it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LineError(type, f"{name} holds half of a surrogate pair at character {error.start}") from error
    return value


def _stop(name: str, value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    return tuple(text(name, item, "invalid_option") for item in texts)


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "max_new_tokens": whole_number,
    "temperature": number,
    "top_k": whole_number,
    "top_p": number,
    "seed": whole_number,
    "n": whole_number,
    "stop": _stop,
    "ignore_eos": flag,
    "logprobs": flag,
}


def sampling_params(fields: JsonObject, names: Mapping[str, str], base: SamplingParams) -> SamplingParams:
    """Return `base` with the options that `fields` holds; `names` maps their names there to ours.

    null counts as absent. Raises LineError for a wrong type or range, and for two names of one option that differ.
    """
    given: dict[str, Any] = {}
    for name, ours in names.items():
        if fields.get(name) is None:
            continue
        value = _READERS[ours](name, fields[name])
        if given.setdefault(ours, value) != value:
            raise LineError("invalid_option", f"{name} is {value}, but another name for it says {given[ours]}")
    try:
        return dataclasses.replace(base, **given)
    except UsageError as error:
        raise LineError("invalid_option", str(error)) from error


def prompt_text(name: str, value: object) -> str:
    """Read a prompt as text, not empty."""
    prompt = text(name, value)
    if not prompt:
        raise LineError("invalid_prompt", f"{name} is empty")
    return prompt


def prompt_token_ids(name: str, value: object) -> list[int]:
    """Read a prompt as token ids; that they are in the vocabulary is for the engine to check."""
    if not isinstance(value, list) or not value:
        raise LineError("invalid_prompt", f"{name} is {reprlib.repr(value)}: it must be a list with token ids")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise LineError("invalid_prompt", f"{name} holds {reprlib.repr(item)}, which is no token id")
    return value


def messages(name: str, value: object) -> list[Message]:
    """Read a conversation: one message or more."""
    if not isinstance(value, list) or not value:
        raise LineError("invalid_prompt", f"{name} is {reprlib.repr(value)}: it must be a list with messages")
    return [_message(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise LineError("invalid_prompt", f"{name} is {reprlib.repr(value)}: it must hold role and content")
    role = value.get("role")
    if role not in ROLES:
        raise LineError("invalid_prompt", f"{name}.role is {reprlib.repr(role)}: it must be one of {', '.join(ROLES)}")
    for key in ("tool_calls", "function_call"):
        refuse_unsupported(f"{name}.{key}", value.get(key))
    return {"role": role, "content": _content(f"{name}.content", value.get("content"))}


def _content(name: str, value: object) -> str:
    """Read a message's content: text, or OpenAI's list of parts as far as they are text."""
    if not isinstance(value, list):
        return text(name, value)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise LineError("unsupported_option", f"{name}[{index}] is no part of type text: only text is supported")
        parts.append(text(f"{name}[{index}].text", part.get("text")))
    return "".join(parts)


def is_scalar(value: object) -> bool:
    """Tell whether JSON can hold `value` as one string, number, true, false or null."""
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
