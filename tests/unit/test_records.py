"""Files of input lines, and their records: one a line, in input order, whatever the lines hold."""

import codecs
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_tp.engine.request import Completion, SamplingParams
from mpi_tp.errors import FileError
from mpi_tp.records import (
    BadLine,
    InputLine,
    OrderedWriter,
    error_record,
    prompt_lines,
    read_lines,
    record,
)
from mpi_tp.records.inputs import MAX_LINE_BYTES

BASE = SamplingParams(seed=100)


def read(tmp_path: Path, content: str | bytes, name: str = "in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_lines(path, BASE))


def test_numbers_are_those_of_an_editor_and_blank_lines_are_skipped(tmp_path: Path):
    items = read(tmp_path, '\n{"prompt": "a"}\r\n  \t\n{"prompt": "b", "id": "x"}')
    assert items == [
        InputLine(2, 2, "a", SamplingParams(seed=102)),
        InputLine(4, "x", "b", SamplingParams(seed=104)),
    ]


def test_gzip_is_told_by_content_and_may_have_several_members(tmp_path: Path):
    packed = gzip.compress(b'{"prompt": "a"}\n') + gzip.compress(b'{"prompt": "b"}\n')
    assert [item.prompt for item in read(tmp_path, packed, "in.jsonl")] == ["a", "b"]
    assert [item.prompt for item in read(tmp_path, b'{"prompt": "c"}\n', "in.jsonl.gz")] == ["c"]


def test_a_text_file_holds_one_prompt_a_line(tmp_path: Path):
    text = '  indented \n\n{"prompt": "no JSON here"}\r\nend\u2028of'
    expected = [(1, "  indented "), (3, '{"prompt": "no JSON here"}'), (4, "end\u2028of")]
    for name, content in (("in.txt", text.encode()), ("in.txt.gz", gzip.compress(text.encode()))):
        assert [(item.id, item.prompt) for item in read(tmp_path, content, name)] == expected


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path):
    [line] = read(tmp_path, codecs.BOM_UTF8 + b'{"prompt": "a"}')
    assert line.prompt == "a"


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_line_that_is_not_utf8_spoils_only_itself(tmp_path: Path, name: str):
    first, second, third = read(tmp_path, b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n{"prompt": "b"}', name)
    assert (second.id, second.type) == (2, "invalid_encoding")
    assert "byte 15" in second.message
    assert isinstance(first, InputLine)
    assert isinstance(third, InputLine)


@pytest.mark.parametrize("packed", [False, True])
def test_an_endless_line_is_one_error_record(tmp_path: Path, packed: bool):
    with (gzip.open if packed else open)(tmp_path / "in.jsonl", "wb") as file:
        file.write(b'{"prompt": "one"}\n{"prompt": "')
        for _ in range(3):
            file.write(b"a" * MAX_LINE_BYTES)
        file.write(b'"}\n{"prompt": "three"}\n')
    one, endless, three = read_lines(tmp_path / "in.jsonl", BASE)
    assert isinstance(one, InputLine)
    assert isinstance(three, InputLine)
    assert (three.number, three.prompt) == (3, "three")
    assert isinstance(endless, BadLine)
    assert (endless.number, endless.type) == (2, "line_too_long")


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    # The pipe stays open: a reader that wants the whole input first would wait for ever.
    items = read_lines(path, BASE)
    assert [next(items).prompt, next(items).prompt] == ["a", "b"]
    os.close(writer)


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(packed: bool):
    code = (
        "from mpi_tp.records import read_lines; from mpi_tp.engine.request import SamplingParams\n"
        "print([line.prompt for line in read_lines(None, SamplingParams())])"
    )
    content = b'{"prompt": "a"}\n\n{"prompt": "b"}'
    content = gzip.compress(content) if packed else content
    run = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
    assert run.stdout == b"['a', 'b']\n"


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_opened_is_refused_before_any_line_is_asked_for(tmp_path: Path, name: str):
    with pytest.raises(FileError, match="cannot read"):
        read_lines(tmp_path / name, BASE)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_gzip_file_is_a_file_error_that_names_the_line(tmp_path: Path, damage: str):
    rng = random.Random(0)
    packed = bytearray(gzip.compress("".join(f'{{"prompt": "{rng.random()}"}}\n' for _ in range(9_000)).encode()))
    packed = packed[:-5_000] if damage == "cut" else packed[:90_000] + b"\xff" * 50 + packed[90_050:]
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(packed)
    items = read_lines(path, BASE)
    assert isinstance(next(items), InputLine)
    with pytest.raises(FileError, match=r"in\.jsonl\.gz after line [1-9]\d+"):
        list(items)


def test_prompts_without_a_file_are_numbered_like_lines():
    assert list(prompt_lines(["a", "b"], BASE)) == [
        InputLine(1, 1, "a", SamplingParams(seed=101)),
        InputLine(2, 2, "b", SamplingParams(seed=102)),
    ]


# Records


def test_a_record_has_the_fields_of_the_contract():
    line = InputLine(3, "x", "a", BASE)
    done = Completion("caf\u00e9", [5, 6, 2], "stop")
    expected = {"id": "x", "text": "caf\u00e9", "token_ids": [5, 6, 2], "finish_reason": "stop"}
    assert record(line, 9, [done]) == expected | {"prompt_tokens": 9, "completion_tokens": 3}


def test_several_samples_are_choices():
    line = InputLine(3, "x", "a", BASE)
    samples = [Completion("a", [5, 2], "stop", [-0.5, -1.0]), Completion("b", [6], "length", [-2.0])]
    assert record(line, 9, samples) == {
        "id": "x",
        "choices": [
            {
                "index": 0,
                "text": "a",
                "token_ids": [5, 2],
                "finish_reason": "stop",
                "completion_tokens": 2,
                "logprobs": [-0.5, -1.0],
            },
            {
                "index": 1,
                "text": "b",
                "token_ids": [6],
                "finish_reason": "length",
                "completion_tokens": 1,
                "logprobs": [-2.0],
            },
        ],
        "prompt_tokens": 9,
        "completion_tokens": 3,
    }


def test_logprobs_come_back_bit_for_bit(tmp_path: Path):
    wanted = -np.random.default_rng(0).exponential(5, 1_000).astype(np.float32)
    with OrderedWriter.open(tmp_path / "out") as writer:
        line = InputLine(1, 1, "a", BASE)
        writer.write(0, record(line, 1, [Completion("t", [1] * 1_000, "length", wanted.tolist())]))
    got = np.array(json.loads((tmp_path / "out").read_text())["logprobs"], np.float32)
    assert got.tobytes() == wanted.tobytes()


def test_an_error_record_has_the_fields_of_the_contract():
    bad = InputLine(3, "x", "a", BASE).refused("prompt_too_long", "too long")
    assert error_record(bad) == {"id": "x", "error": {"type": "prompt_too_long", "message": "too long"}}


# Bugs of other batch tools


def test_one_bad_line_never_shifts_or_stops_the_others(tmp_path: Path):
    """A prompt too long was once answered twice, and every later answer went to the wrong input (vLLM #1655)."""
    lines = ['{"prompt": "a", "id": 0}', "{", '{"prompt": "", "id": 2}', '{"prompt": "d", "id": 3}']
    output = tmp_path / "out.jsonl"
    with OrderedWriter.open(output) as writer:
        for sequence, item in enumerate(read(tmp_path, "\n".join(lines))):
            if isinstance(item, InputLine) and item.id == 0:
                item = item.refused("prompt_too_long", "5000 tokens do not fit in 4096")
            served = isinstance(item, InputLine)
            writer.write(sequence, record(item, 1, [Completion("t", [1], "stop")]) if served else error_record(item))
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [0, 2, 2, 3]
    assert [answer.get("error", {}).get("type") for answer in answers] == [
        "prompt_too_long",
        "invalid_json",
        "invalid_prompt",
        None,
    ]


def test_equal_ids_are_answered_line_by_line(tmp_path: Path):
    items = read(tmp_path, '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}')
    assert [(item.id, item.prompt, item.number) for item in items] == [("x", "a", 1), ("x", "b", 2)]


def garbage_line(rng: random.Random) -> bytes:
    """A line of random bytes, or a good one with one field, or some bytes, changed."""
    values = [None, 0, -1, 1e300, "", "\ud800", [], {}, [[]], [None], {"role": 1}, True, "x" * 50, [{}], 2**70]
    names = ("id", "prompt", "messages", "prompt_token_ids", "stop", "n", "seed", "temperature", "tools")
    names += ("custom_id", "body", "url", "method")
    good = rng.choice(
        [
            {"id": 5, "prompt": "a"},
            {"messages": [{"role": "user", "content": "a"}]},
            {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": "m"}},
        ]
    )
    for target in (good, good.get("body", good)):
        if rng.random() < 0.7:
            target[rng.choice(names)] = rng.choice(values)
    line = bytearray(json.dumps(good).encode())
    for _ in range(rng.choice([0, 0, 1, 5])):
        line[rng.randrange(len(line))] = rng.randrange(256)
    line = line if rng.random() < 0.8 else bytearray(rng.randbytes(rng.randrange(40)))
    return bytes(line).replace(b"\n", b" ")


def test_garbage_gives_one_item_and_one_record_a_line(tmp_path: Path):
    rng = random.Random(2026)
    lines = [garbage_line(rng) for _ in range(5_000)]
    filled = [number for number, line in enumerate(lines, 1) if line.strip()]
    items = read(tmp_path, b"\n".join(lines))
    assert [item.number for item in items] == filled
    assert {type(item) for item in items} == {BadLine, InputLine}
    output = tmp_path / "out.jsonl"
    with OrderedWriter.open(output) as writer:
        for sequence, item in enumerate(items):
            served = isinstance(item, InputLine)
            writer.write(sequence, record(item, 1, [Completion("t", [1], "stop")]) if served else error_record(item))
    assert len([json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]) == len(filled)
