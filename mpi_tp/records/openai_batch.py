"""OpenAI's batch file format: its request lines, and their answers as the same API would give them."""

import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpi_tp.engine.request import Completion, SamplingParams
from mpi_tp.records import fields
from mpi_tp.records.lines import BadLine, InputLine, JsonObject, LineError, Prompt

TokenText = Callable[[int], str]

_CHAT_URL, _TEXT_URL = "/v1/chat/completions", "/v1/completions"
_NATIVE_KEYS = ("prompt", "messages", "prompt_token_ids")

_OPTION_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop",
    "seed": "seed",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
}
# Fields that say who asks or how to deliver; the text does not depend on them.
_WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)


def is_request(line: JsonObject) -> bool:
    """Tell a line of this format from one of our own, which may have such columns beside its prompt."""
    return ("custom_id" in line or "body" in line) and not any(key in line for key in _NATIVE_KEYS)


def parse(number: int, line: JsonObject, base: SamplingParams) -> InputLine | BadLine:
    """Read a request line; options that it leaves out are those of `base`, not OpenAI's."""
    custom_id = line.get("custom_id")
    line_id = custom_id if isinstance(custom_id, str) else None
    try:
        url, body = _envelope(line)
        prompt_key = "messages" if url == _CHAT_URL else "prompt"
        for name in sorted(body.keys() - _OPTION_NAMES.keys() - _WITHOUT_EFFECT - {prompt_key}):
            fields.refuse_unsupported(name, body[name])
        options = body if url == _CHAT_URL else body | {"logprobs": _text_logprobs(body.get("logprobs"))}
        params = fields.sampling_params(options, _OPTION_NAMES, base)
        prompt: Prompt = (
            fields.messages("messages", body.get("messages")) if url == _CHAT_URL else _prompt(body.get("prompt"))
        )
        model = "" if body.get("model") is None else fields.text("model", body["model"], "invalid_option")
    except LineError as error:
        return BadLine(number, line_id, error.type, str(error), "openai")
    return InputLine(number, line_id, prompt, params, "openai", model)


def _envelope(line: JsonObject) -> tuple[str, JsonObject]:
    """Return the URL and the body of a request line."""
    custom_id, method, url, body = (line.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str):
        raise LineError("invalid_request", f"custom_id is {reprlib.repr(custom_id)}: it must be text")
    if method != "POST":
        raise LineError("invalid_request", f"method is {reprlib.repr(method)}: it must be 'POST'")
    if url not in (_CHAT_URL, _TEXT_URL):
        raise LineError("invalid_request", f"url is {reprlib.repr(url)}: it must be {_CHAT_URL} or {_TEXT_URL}")
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body is {reprlib.repr(body)}: it must be an object with the request")
    return url, body


def _text_logprobs(value: object) -> bool | None:
    """Read the count of alternatives that a text completion asks for: 0 is the chosen token alone, all we have."""
    if value is None:
        return None
    if fields.whole_number("logprobs", value) != 0:
        raise LineError("unsupported_option", f"logprobs is {value}: only 0, the chosen tokens, is supported")
    return True


def _prompt(value: object) -> str | list[int]:
    """Read a text completion's prompt: text or token ids, or a list with one such prompt."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise LineError("unsupported_option", f"prompt holds {len(value)} prompts: write a line for each")
        value = value[0]
    return fields.prompt_token_ids("prompt", value) if isinstance(value, list) else fields.prompt_text("prompt", value)


def response(line: InputLine, prompt_tokens: int, completions: list[Completion], token_text: TokenText) -> JsonObject:
    """Return the record of a served line; `token_text` names a token where log-probabilities are listed."""
    chat = isinstance(line.prompt, list) and isinstance(line.prompt[0], dict)
    choice = _chat_choice if chat else _text_choice
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": line.model,
        "choices": [
            {"index": index, **choice(completion, token_text), "finish_reason": completion.finish_reason}
            for index, completion in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return _record(line, 200, body)


def error_response(line: BadLine) -> JsonObject:
    """Return the record of a line that cannot be served: what the API would answer to the request."""
    error = {"message": line.message, "type": "invalid_request_error", "param": None, "code": line.type}
    return _record(line, 400, {"error": error})


def _record(line: InputLine | BadLine, status: int, body: JsonObject) -> JsonObject:
    answer = {"status_code": status, "request_id": f"req_{line.number}", "body": body}
    return {"id": f"batch_req_{line.number}", "custom_id": line.id, "response": answer, "error": None}


def _chat_choice(completion: Completion, token_text: TokenText) -> JsonObject:
    logprobs: dict[str, Any] | None = None
    if completion.logprobs is not None:
        content: list[JsonObject] = [
            {"token": token_text(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    return {"message": message, "logprobs": logprobs}


def _text_choice(completion: Completion, token_text: TokenText) -> JsonObject:
    logprobs: dict[str, Any] | None = None
    if completion.logprobs is not None:
        tokens = [token_text(token) for token in completion.token_ids]
        logprobs = {"tokens": tokens, "token_logprobs": completion.logprobs, "top_logprobs": None, "text_offset": None}
    return {"text": completion.text, "logprobs": logprobs}
