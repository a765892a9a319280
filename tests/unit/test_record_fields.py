"""What a line of our own format may hold: prompts, ids, sampling options, and columns of the user's data."""

import itertools
import json
from pathlib import Path

import pytest

from mpi_tp.engine.request import Completion, SamplingParams
from mpi_tp.records import BadLine, InputLine, prompt_lines, read_lines, record

BASE = SamplingParams(seed=100)


def read_one(tmp_path: Path, line: object, base: SamplingParams = BASE, **chat):
    path = tmp_path / "in.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    [item] = read_lines(path, base, **chat)
    return item


def bad_line(tmp_path: Path, line: object) -> BadLine:
    item = read_one(tmp_path, line)
    assert isinstance(item, BadLine)
    assert "\n" not in item.message
    return item


def test_the_three_kinds_of_prompt(tmp_path: Path):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    assert read_one(tmp_path, {"prompt": "a\nb"}).prompt == "a\nb"
    assert read_one(tmp_path, {"messages": messages}).prompt == messages
    assert read_one(tmp_path, {"prompt_token_ids": [0, 7]}).prompt == [0, 7]


def test_null_counts_as_absent_as_tables_write_it(tmp_path: Path):
    columns = dict.fromkeys(("id", "messages", "prompt_token_ids", "temperature", "stop", "max_tokens", "tools", "x"))
    assert read_one(tmp_path, {"prompt": "a", **columns}) == InputLine(1, 1, "a", SamplingParams(seed=101))


def test_chat_wraps_plain_prompts_only(tmp_path: Path):
    system, user = {"role": "system", "content": "Be"}, {"role": "user", "content": "hi"}
    assert read_one(tmp_path, {"prompt": "hi"}, chat=True).prompt == [user]
    assert read_one(tmp_path, {"prompt": "hi"}, chat=True, system="Be").prompt == [system, user]
    assert read_one(tmp_path, {"messages": [user]}, chat=True, system="Be").prompt == [user]
    assert read_one(tmp_path, {"prompt_token_ids": [1]}, chat=True, system="Be").prompt == [1]
    assert [line.prompt for line in prompt_lines(["hi"], BASE, chat=True, system="Be")] == [[system, user]]


def test_content_in_parts_is_joined_as_far_as_it_is_text(tmp_path: Path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_one(tmp_path, {"messages": [{"role": "user", "content": parts}]}).prompt[0]["content"] == "ab"
    image = {"messages": [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}]}
    bad = bad_line(tmp_path, image)
    assert bad.type == "unsupported_option"
    assert "messages[0].content[2]" in bad.message


@pytest.mark.parametrize("line_id", ["x", "", 7, -1, 0, 1.5, True, False, 10**30, "\ud800"])
def test_any_scalar_is_an_id_and_comes_back_as_it_was(tmp_path: Path, line_id: object):
    item = read_one(tmp_path, {"id": line_id, "prompt": "a"})
    answer = record(item, 1, [Completion("", [5], "length")])
    assert answer["id"] == line_id
    assert type(answer["id"]) is type(line_id)


@pytest.mark.parametrize(
    ("line", "type", "told"),
    [
        ("{", "invalid_json", "character 2"),
        ("nonsense", "invalid_json", "not JSON"),
        ('{"prompt": "a"} x', "invalid_json", "not JSON"),
        ('{"prompt": NaN}', "invalid_json", "NaN"),
        ('{"prompt": "a", "temperature": Infinity}', "invalid_json", "Infinity"),
        ('{"id": 1' + "0" * 5000 + ', "prompt": "a"}', "invalid_json", "not JSON"),
        ("[" * 100_000, "invalid_json", "not JSON"),
        ('["prompt"]', "invalid_json", "object"),
        ("null", "invalid_json", "object"),
        ("3", "invalid_json", "object"),
        ('{"id": 1e999, "prompt": "a"}', "invalid_id", "inf"),
        ({"id": [1], "prompt": "a"}, "invalid_id", "[1]"),
        ({"id": {}, "prompt": "a"}, "invalid_id", "{}"),
        ({}, "invalid_prompt", "no prompt"),
        ({"text": "a"}, "invalid_prompt", "no prompt"),
        ({"prompt": None}, "invalid_prompt", "no prompt"),
        ({"prompt": ""}, "invalid_prompt", "prompt is empty"),
        ({"prompt": 5}, "invalid_prompt", "prompt is 5"),
        ({"prompt": [1, 2]}, "invalid_prompt", "prompt is [1, 2]"),
        ({"prompt": "a\ud800"}, "invalid_prompt", "surrogate pair at character 1"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "invalid_prompt", "both prompt and messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "invalid_prompt", "both prompt and prompt_token_ids"),
        ({"messages": []}, "invalid_prompt", "messages is []"),
        ({"messages": "a"}, "invalid_prompt", "messages is 'a'"),
        ({"messages": {"role": "user", "content": "a"}}, "invalid_prompt", "list with messages"),
        ({"messages": ["a"]}, "invalid_prompt", "messages[0] is 'a'"),
        ({"messages": [{"content": "a"}]}, "invalid_prompt", "messages[0].role is None"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "invalid_prompt", "messages[0].role is 'usr'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "invalid_prompt", "messages[0].role is ['user']"),
        ({"messages": [{"role": "user"}]}, "invalid_prompt", "messages[0].content is None"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_prompt", "messages[0].content is 5"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "invalid_prompt", "surrogate"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "unsupported_option",
            "messages[0].tool_calls",
        ),
        ({"prompt_token_ids": []}, "invalid_prompt", "prompt_token_ids is []"),
        ({"prompt_token_ids": "1 2"}, "invalid_prompt", "prompt_token_ids is '1 2'"),
        ({"prompt_token_ids": [1, -1]}, "invalid_prompt", "holds -1"),
        ({"prompt_token_ids": [1, 2.0]}, "invalid_prompt", "holds 2.0"),
        ({"prompt_token_ids": [True]}, "invalid_prompt", "holds True"),
        ({"prompt_token_ids": [[1]]}, "invalid_prompt", "holds [1]"),
    ],
)
def test_lines_that_cannot_be_served(tmp_path: Path, line: object, type: str, told: str):
    bad = bad_line(tmp_path, line)
    assert (bad.number, bad.id, bad.type) == (1, 1, type)
    assert told in bad.message


def test_a_bad_line_keeps_its_id(tmp_path: Path):
    assert bad_line(tmp_path, {"id": "mine", "prompt": ""}).id == "mine"
    assert bad_line(tmp_path, {"id": "mine", "prompt": "a", "n": 0}).id == "mine"


def test_options_on_the_line_win_over_the_flags(tmp_path: Path):
    base = SamplingParams(1, 0.1, 1, 0.1, 100, 1, ("flag",), ignore_eos=False, logprobs=False)
    line = {"prompt": "a", "max_new_tokens": 2, "temperature": 2, "top_k": 2, "top_p": 1, "seed": 5, "n": 2}
    line |= {"stop": ["x", "y"], "ignore_eos": True, "logprobs": True}
    item = read_one(tmp_path, line, base)
    assert item.params == SamplingParams(2, 2.0, 2, 1.0, 5, 2, ("x", "y"), ignore_eos=True, logprobs=True)
    assert isinstance(item.params.temperature, float)
    assert read_one(tmp_path, {"prompt": "a", "stop": "x"}, base).params.stop == ("x",)
    assert read_one(tmp_path, {"prompt": "a", "stop": []}, base).params.stop == ()
    assert read_one(tmp_path, {"prompt": "a"}, base).params == SamplingParams(1, 0.1, 1, 0.1, 101, 1, ("flag",))


def test_max_tokens_is_another_name_for_max_new_tokens(tmp_path: Path):
    assert read_one(tmp_path, {"prompt": "a", "max_tokens": 3}).params.max_new_tokens == 3
    assert read_one(tmp_path, {"prompt": "a", "max_tokens": 3, "max_new_tokens": 3}).params.max_new_tokens == 3
    assert "3" in bad_line(tmp_path, {"prompt": "a", "max_tokens": 3, "max_new_tokens": 4}).message


def test_whole_columns_that_a_table_with_gaps_turned_into_floats(tmp_path: Path):
    params = read_one(tmp_path, {"prompt": "a", "max_new_tokens": 64.0, "seed": 7.0}).params
    assert (params.max_new_tokens, params.seed) == (64, 7)
    assert isinstance(params.max_new_tokens, int)


def test_columns_of_the_data_are_ignored(tmp_path: Path):
    extra = {"answer": "b", "metadata": {"a": 1}, "url": "x", "user": 5, "temprature": 1, "custom_id": "c", "body": "d"}
    assert read_one(tmp_path, {"prompt": "a", **extra}) == InputLine(1, 1, "a", SamplingParams(seed=101))


def test_options_that_we_do_not_have_are_no_columns(tmp_path: Path):
    bad = bad_line(tmp_path, {"prompt": "a", "repetition_penalty": 1.1})
    assert bad.type == "unsupported_option"
    assert "repetition_penalty" in bad.message
    without_effect = {"repetition_penalty": 1.0, "presence_penalty": 0, "tools": [], "stream": False, "best_of": 1}
    assert isinstance(read_one(tmp_path, {"prompt": "a", **without_effect}), InputLine)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("max_new_tokens", "max_tokens", "top_k", "n"), (0, -1, 1.5, "5", True, [1], 2**63, 1e300)),
        *itertools.product(("temperature",), (-0.5, "0", True, [], 10**400)),
        *itertools.product(("top_p",), (0, -1, 1.5, "1", False)),
        *itertools.product(("seed",), (1.5, "1", True, 2**63, -(2**63) - 1)),
        *itertools.product(("stop",), ("", [""], 5, [5], ["a", None], {"a": 1}, "\ud800")),
        *itertools.product(("ignore_eos", "logprobs"), (0, 1, "true", [])),
        ("n", 10**6),
    ],
)
def test_wrong_options(tmp_path: Path, name: str, value: object):
    bad = bad_line(tmp_path, {"prompt": "a", name: value})
    assert bad.type == "invalid_option"
    assert name.replace("max_tokens", "max_") in bad.message
