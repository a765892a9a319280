"""Input lines of a batch: JSON Lines in our own or in OpenAI's batch format, or one prompt a line of plain text.

A line of our own is an object with exactly one of `prompt`, `messages` and `prompt_token_ids`, maybe an `id`, and any
sampling option; other keys are columns of the user's data and ignored, except the names of well-known sampling options
that we do not have: these would change the result, so they are refused. null counts as absent.
"""

import codecs
import dataclasses
import gzip
import io
import itertools
import json
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from mpi_tp.engine.request import SAMPLING_FIELDS, SamplingParams
from mpi_tp.errors import FileError
from mpi_tp.records import fields, openai_batch
from mpi_tp.records.lines import BadLine, InputLine, JsonObject, Line, LineError, Message, Prompt

MAX_LINE_BYTES = 16 << 20
"""A longer line becomes an error record and is not held in memory, however long: a million token ids have 7 MB."""

_GZIP_MAGIC = b"\x1f\x8b"
_PROMPT_READERS: dict[str, Callable[[str, object], Prompt]] = {
    "prompt": fields.prompt_text,
    "messages": fields.messages,
    "prompt_token_ids": fields.prompt_token_ids,
}
_OPTION_NAMES = {name: name for name in sorted(SAMPLING_FIELDS)} | {"max_tokens": "max_new_tokens"}


def read_lines(
    source: Path | None,
    sampling: SamplingParams,
    *,
    chat: bool = False,
    system: str | None = None,
    wanted: Callable[[int], bool] = lambda index: True,
    limit: int | None = None,
) -> Iterator[Line]:
    """Yield one item for each line that is not blank, reading no further than asked.

    Lines that are not blank count: of the first `limit` those are read whose index, from 0, is `wanted`.

    `source` None is standard input. A file named *.txt (*.txt.gz) holds one prompt a line, any other JSON Lines; gzip
    is recognised by content. A line's own options win over `sampling`; its default seed is that of `sampling` plus the
    line's number. `chat` makes a plain prompt a user message, with `system` as system message before it.

    Raises FileError: at once if the file cannot be opened, while iterating if it cannot be read on.
    """
    stream = _open(source)
    plain = source is not None and source.name.endswith((".txt", ".txt.gz"))
    parser = _Parser(sampling, chat, system)
    parse = parser.plain if plain else parser.json
    filled = itertools.islice(((number, raw) for number, raw in _numbered(stream, source) if raw.strip()), limit)
    return (parse(number, raw) for index, (number, raw) in enumerate(filled) if wanted(index))


def prompt_lines(
    prompts: Iterable[str], sampling: SamplingParams, *, chat: bool = False, system: str | None = None
) -> Iterator[InputLine]:
    """Yield the lines of a file that would hold these prompts."""
    parser = _Parser(sampling, chat, system)
    return (parser.line(number, number, prompt) for number, prompt in enumerate(prompts, 1))


def _open(source: Path | None) -> BinaryIO:
    file = sys.stdin.fileno() if source is None else source
    try:
        stream = io.BufferedReader(io.FileIO(file, closefd=source is not None))
        compressed = stream.peek(2)[:2] == _GZIP_MAGIC
    except OSError as error:
        raise FileError(f"cannot read {source or 'standard input'}: {error.strerror}") from error
    return cast(BinaryIO, gzip.open(stream)) if compressed else stream


def _numbered(stream: BinaryIO, source: Path | None) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, raw in enumerate(iter(lambda: _read_line(stream), b""), 1):
            yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"cannot read {source or 'standard input'} after line {number}: {error}") from error


def _read_line(stream: BinaryIO) -> bytes:
    """Return the next line; of one that is too long, no more than shows that it is."""
    line = stream.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES)
    return line


@dataclasses.dataclass(frozen=True)
class _Parser:
    sampling: SamplingParams
    chat: bool
    system: str | None

    def plain(self, number: int, raw: bytes) -> InputLine | BadLine:
        try:
            return self.line(number, number, _decode(raw).rstrip("\r\n"))
        except LineError as error:
            return BadLine(number, number, error.type, str(error))

    def json(self, number: int, raw: bytes) -> InputLine | BadLine:
        try:
            line = _json_object(_decode(raw))
        except LineError as error:
            return BadLine(number, number, error.type, str(error))
        if openai_batch.is_request(line):
            return openai_batch.parse(number, line, self._base(number))
        return self._native(number, line)

    def line(self, number: int, line_id: int, prompt: str) -> InputLine:
        return InputLine(number, line_id, self._wrapped(prompt), self._base(number))

    def _native(self, number: int, line: JsonObject) -> InputLine | BadLine:
        line_id = number if line.get("id") is None else line["id"]
        if not fields.is_scalar(line_id):
            return BadLine(number, number, "invalid_id", f"id is {reprlib.repr(line_id)}: it must be text or a number")
        try:
            for name in sorted(fields.NEUTRAL_VALUES.keys() & line.keys()):
                fields.refuse_unsupported(name, line[name])
            params = fields.sampling_params(line, _OPTION_NAMES, self._base(number))
            return InputLine(number, line_id, self._prompt(line), params)
        except LineError as error:
            return BadLine(number, line_id, error.type, str(error))

    def _prompt(self, line: JsonObject) -> Prompt:
        given = [name for name in _PROMPT_READERS if line.get(name) is not None]
        if len(given) != 1:
            found = f"both {given[0]} and {given[1]}" if given else "no prompt"
            raise LineError("invalid_prompt", f"the line has {found}: give one of {', '.join(_PROMPT_READERS)}")
        prompt = _PROMPT_READERS[given[0]](given[0], line[given[0]])
        return self._wrapped(prompt) if isinstance(prompt, str) else prompt

    def _wrapped(self, prompt: str) -> Prompt:
        if not self.chat:
            return prompt
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _base(self, number: int) -> SamplingParams:
        return dataclasses.replace(self.sampling, seed=self.sampling.seed + number)


def _decode(raw: bytes) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise LineError("invalid_encoding", f"the line is not UTF-8 at its byte {error.start}") from error


def _json_object(line: str) -> JsonObject:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"the line is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError("invalid_json", f"the line is {reprlib.repr(value)}: it must be an object, {{…}}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
