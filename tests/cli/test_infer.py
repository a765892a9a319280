"""Batch inference as a user starts it: lines in, one record a line out, whatever the number of ranks."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import ROOT, MpiRun
from tests.cli.test_launch import alone
from tests.support.engines import byte_level_tokenizer
from tests.support.sets import TEMPLATE, make_sets, save_checkpoint

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SAMPLING = ("--temperature", 1.2, "--top-k", 100, "--seed", 7, "--max-new-tokens", 12)

# What a line holds, and the type of its error, None for a good one.
LINES: list[tuple[str, str | None]] = [
    ('{"id": "first", "prompt": "one"}', None),
    ("{bad", "invalid_json"),
    ('{"id": 5, "prompt_token_ids": [1, 2, 3], "n": 2, "logprobs": true}', None),
    ("", None),
    ('{"id": "first", "prompt": "the same id, another line", "temperature": 0, "max_new_tokens": 3}', None),
    (f'{{"id": "long", "prompt": "{300 * "x"}"}}', "prompt_too_long"),
    ('{"id": "none"}', "invalid_prompt"),
    ('{"id": "unknown", "prompt_token_ids": [257]}', "unknown_token"),
    ('{"id": "chat", "messages": [{"role": "user", "content": "hi"}]}', None),
    ('{"id": "seed", "prompt": "one", "seed": 8}', None),
    ('{"id": "wrong", "prompt": "x", "temperature": -1}', "invalid_option"),
    ('{"prompt": "the last, without a line feed", "logprobs": true}', None),
]
RECORDS = [(line, kind) for line, kind in LINES if line]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("infer")
    checkpoint = save_checkpoint(folder / "model", chat_template=TEMPLATE)
    return make_sets(checkpoint, folder, 1, 2, 3)


def infer(mpirun: MpiRun, ranks: int, shards: Path, *flags: str | Path | float) -> str:
    """Return what a run printed on stdout; it has to end well, with its figures last on stderr."""
    return checked(mpirun(ranks, "-m", "mpi_tp.infer", "--shards", shards, *map(str, flags), env=WITHOUT_GPU))


def infer_alone(shards: Path, *flags: str | Path | float, stdin: str = "") -> str:
    """Do the same on one rank without a launcher, which would stand between the program and its standard input."""
    command = [sys.executable, "-m", "mpi_tp.infer", "--shards", shards, *flags]
    result = subprocess.run(
        list(map(str, command)),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=alone(**WITHOUT_GPU),
        timeout=60,
    )
    return checked(result)


def checked(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    check_figures(result)
    return result.stdout


def check_figures(result: subprocess.CompletedProcess[str]) -> None:
    (line,) = result.stderr.splitlines()
    for figure in ("mpi_tp: ", " tokens/s", "first token after ", "MB/s", "peak memory "):
        assert figure in line


def parsed(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def mixed_lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_text("\n".join(line for line, _ in LINES))
    return path


@pytest.fixture(scope="module")
def outputs(
    mpirun: MpiRun, sets: dict[int, Path], mixed_lines: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """The output of the mixed lines at temperature > 0, by the number of ranks."""
    files = {ranks: tmp_path_factory.mktemp("out") / "out.jsonl" for ranks in sets}
    for ranks, output in files.items():
        batch = ("--max-batch-size", 64 if ranks == 1 else ranks)
        printed = infer(mpirun, ranks, sets[ranks], "--input", mixed_lines, "--output", output, *SAMPLING, *batch)
        assert printed == ""
    return files


def test_every_line_has_its_record_in_its_place(outputs: dict[int, Path]) -> None:
    records = parsed(outputs[2].read_text())
    for record, (_, kind) in zip(records, RECORDS, strict=True):
        assert record.get("error", {}).get("type") == kind
    ids = ["first", 2, 5, "first", "long", "none", "unknown", "chat", "seed", "wrong", 12]
    assert [record["id"] for record in records] == ids


def test_the_bytes_are_the_same_at_any_rank_count_and_batch_size(outputs: dict[int, Path]) -> None:
    assert outputs[1].read_bytes() == outputs[2].read_bytes() == outputs[3].read_bytes()


def test_records_hold_what_was_asked_for(outputs: dict[int, Path]) -> None:
    by_id = {record["id"]: record for record in parsed(outputs[3].read_text())}
    chat = by_id["chat"]
    assert chat["prompt_tokens"] == len("[user]hi")
    assert chat["completion_tokens"] == len(chat["token_ids"]) <= 12
    assert chat["text"] == byte_level_tokenizer().decode(chat["token_ids"])
    assert set(chat) == {"id", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens"}
    two = by_id[5]["choices"]
    assert [choice["index"] for choice in two] == [0, 1]
    assert two[0]["token_ids"] != two[1]["token_ids"]
    assert all(len(choice["logprobs"]) == len(choice["token_ids"]) for choice in two)
    greedy = by_id["first"]
    assert (greedy["completion_tokens"], greedy["finish_reason"]) == (3, "length")
    assert "prompt has 300 tokens and the context holds 256" in by_id["long"]["error"]["message"]


def test_logprobs_are_float32_and_survive_json(outputs: dict[int, Path]) -> None:
    logprobs = parsed(outputs[1].read_text())[-1]["logprobs"]
    assert all(value < 0 for value in logprobs)
    assert [float(np.float32(value)) for value in logprobs] == logprobs


def test_a_lines_seed_is_the_flags_plus_its_number(outputs: dict[int, Path], sets: dict[int, Path]) -> None:
    """Line 1 had seed 7 + 1, and so had the line that says so itself; sent alone with that seed, it gives the same."""
    records = parsed(outputs[2].read_text())
    by_line, by_option = records[0], records[8]
    assert by_line["token_ids"] == by_option["token_ids"]
    line = json.dumps({"prompt": "one", "seed": 8})
    [record] = parsed(infer_alone(sets[1], "--input", "-", *SAMPLING, stdin=line))
    assert record["token_ids"] == by_line["token_ids"]


def test_how_the_output_came_to_be_lies_beside_it(outputs: dict[int, Path], sets: dict[int, Path]) -> None:
    facts = json.loads(outputs[3].with_name("out.jsonl.meta.json").read_text())
    assert facts["set_id"] == json.loads((sets[3] / "manifest.json").read_text())["set_id"]
    assert {"mpi-tp", "torch", "mpi4py", "numpy", "h5py", "tokenizers"} <= facts["versions"].keys()
    assert facts["options"]["sampling"]["temperature"] == 1.2
    assert facts["options"]["shards"] == str(sets[3])
    assert [rank["device"] for rank in facts["ranks"]] == ["cpu"] * 3
    figures = facts["figures"]
    assert (figures["num_lines"], figures["num_records"], figures["num_errors"]) == (11, 11, 5)
    tokens = [record.get("completion_tokens", 0) for record in parsed(outputs[3].read_text())]
    assert figures["completion_tokens"] == sum(tokens)


def test_text_lines_under_gzip_with_limit_samples_and_stop(
    mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt.gz"
    path.write_bytes(gzip.compress(b"alpha\n\nbeta\ngamma\ndelta\n"))
    flags = ("--input", path, "--limit", 3, "--n", 2, "--temperature", 1, "--max-new-tokens", 20, "--ignore-eos")
    records = parsed(infer(mpirun, 2, sets[2], *flags))
    assert [(record["id"], record["prompt_tokens"]) for record in records] == [(1, 5), (3, 4), (4, 5)]
    choices = [choice for record in records for choice in record["choices"]]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 6
    stop = choices[0]["text"][5:7]
    stopped = parsed(infer_alone(sets[1], *flags, "--stop", stop, "--stop", "never said"))[0]["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == choices[0]["text"].partition(stop)[0]


def test_openai_batch_lines_are_answered_in_their_format(sets: dict[int, Path], tmp_path: Path) -> None:
    def line(custom_id: str, url: str, **body: object) -> str:
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}})

    path = tmp_path / "batch.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    lines = [
        line("a", "/v1/chat/completions", messages=chat, max_tokens=4, logprobs=True),
        line("b", "/v1/completions", prompt="x" * 256),
        line("c", "/v1/completions", prompt="hello", max_tokens=2, n=2),
    ]
    path.write_text("\n".join(lines))
    a, b, c = parsed(infer_alone(sets[1], "--input", path))
    assert [record["custom_id"] for record in (a, b, c)] == ["a", "b", "c"]
    assert [record["response"]["status_code"] for record in (a, b, c)] == [200, 400, 200]
    choice = a["response"]["body"]["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == a["response"]["body"]["usage"]["completion_tokens"]
    assert b["response"]["body"]["error"]["code"] == "prompt_too_long"
    assert len(c["response"]["body"]["choices"]) == 2


def test_standard_input_to_standard_output(sets: dict[int, Path]) -> None:
    lines = "".join(json.dumps({"prompt": f"line {at}"}) + "\n" for at in range(20))
    records = parsed(infer_alone(sets[1], "--input", "-", "--max-new-tokens", 2, stdin=lines))
    assert [record["id"] for record in records] == list(range(1, 21))


def test_the_bare_command_shows_something(mpirun: MpiRun, sets: dict[int, Path]) -> None:
    records = parsed(infer(mpirun, 2, sets[2], "--max-new-tokens", 2))
    assert len(records) >= 3
    assert all("error" not in record for record in records)


def test_no_lines_give_no_records(sets: dict[int, Path], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    infer_alone(sets[1], "--input", "-", "--output", output)
    assert output.read_bytes() == b""


def test_chat_without_a_template_is_each_lines_error(tmp_path: Path) -> None:
    sets = make_sets(save_checkpoint(tmp_path / "model"), tmp_path, 1)
    lines = '{"prompt": "hi"}\n{"prompt_token_ids": [1, 2], "max_new_tokens": 2}'
    first, second = parsed(infer_alone(sets[1], "--chat", "--input", "-", stdin=lines))
    assert "no chat template" in first["error"]["message"]
    assert second["completion_tokens"] == 2
