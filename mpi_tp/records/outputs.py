"""Output records: their form, their order, and the files that hold them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mpi_tp.atomic import open_output, replacing, write_errors
from mpi_tp.engine.request import Completion
from mpi_tp.records import openai_batch
from mpi_tp.records.lines import BadLine, InputLine, JsonObject, Line


def _token_by_id(token: int) -> str:
    return f"token_id:{token}"


def record(
    line: InputLine,
    prompt_tokens: int,
    completions: list[Completion],
    token_text: openai_batch.TokenText = _token_by_id,
) -> JsonObject:
    """Return the record of a served line, in the format that it came in.

    One sample lies in the record itself, more lie under `choices`. `token_text` spells the tokens whose
    log-probabilities an OpenAI answer lists by text.
    """
    if line.format == "openai":
        return openai_batch.response(line, prompt_tokens, completions, token_text)
    if len(completions) > 1:
        choices = [{"index": index, **_sample(one), **_tokens(one)} for index, one in enumerate(completions)]
        completion_tokens = sum(len(completion.token_ids) for completion in completions)
        return {
            "id": line.id,
            "choices": choices,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
    [completion] = completions
    return {"id": line.id, **_sample(completion), "prompt_tokens": prompt_tokens, **_tokens(completion)}


def _sample(completion: Completion) -> JsonObject:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }


def _tokens(completion: Completion) -> JsonObject:
    tokens: JsonObject = {"completion_tokens": len(completion.token_ids)}
    return tokens if completion.logprobs is None else tokens | {"logprobs": completion.logprobs}


def error_record(line: BadLine) -> JsonObject:
    """Return the record of a line that cannot be served, in the format that it came in."""
    if line.format == "openai":
        return openai_batch.error_response(line)
    return {"id": line.id, "error": {"type": line.type, "message": line.message}}


class OrderedWriter:
    """Writes records as JSON Lines in the order of their numbers, whatever the order they come in.

    Records that come early wait in memory. Each is passed to the operating system as soon as its turn comes.
    """

    num_resumed = 0
    """What is written here cannot be resumed: every line is answered by this run."""

    def __init__(self, stream: BinaryIO, name: Path | None) -> None:
        self._stream = stream
        self._name = name
        self._next = 0
        self._waiting: dict[int, bytes] = {}

    @classmethod
    @contextmanager
    def open(cls, output: Path | None) -> Iterator["OrderedWriter"]:
        """Open standard output (None) or a file, which appears under its name only when the block ends well.

        Raises FileError if the output cannot be opened or, when the block ends, completed.
        """
        with open_output(output) as stream:
            writer = cls(stream, output)
            yield writer
            assert not writer._waiting, f"record {writer._next} of the output was never written"

    def pending(self, lines: Iterable[Line]) -> Iterator[tuple[int, Line]]:
        """Yield all lines, each with its index."""
        return enumerate(lines)

    def write(self, index: int, record: JsonObject, line: Line | None = None) -> None:
        """Take the record with this index: 0, 1, 2 … each once. Raises FileError, for example for a full disk.

        Nothing depends on the `line` that it answers.
        """
        assert index >= self._next, f"record {index} was written twice"
        assert index not in self._waiting, f"record {index} came twice"
        self._waiting[index] = encode(record) + b"\n"
        with write_errors(self._name):
            while self._next in self._waiting:
                self._stream.write(self._waiting.pop(self._next))
                self._next += 1
            self._stream.flush()


def encode(value: Any) -> bytes:
    """Return JSON in one line, as it is written to outputs."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, say in an id, exists in JSON only as an escape
        return json.dumps(value).encode()


def write_meta(output: Path, facts: Mapping[str, Any]) -> None:
    """Write how an output came to be to `OUTPUT.meta.json` beside it. Raises FileError."""
    path = output.with_name(f"{output.name}.meta.json")
    with replacing(path) as stream, write_errors(path):
        stream.write(json.dumps(dict(facts), indent=2).encode() + b"\n")
