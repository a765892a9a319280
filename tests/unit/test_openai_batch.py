"""OpenAI's batch file format, request lines and their answers."""

import json
from pathlib import Path

import pytest

from mpi_tp.engine.request import Completion, SamplingParams
from mpi_tp.records import BadLine, InputLine, error_record, read_lines, record

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BASE = SamplingParams(max_new_tokens=9, seed=100)


def read_one(tmp_path: Path, line: object, base: SamplingParams = BASE, **chat):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line))
    [item] = read_lines(path, base, **chat)
    return item


def request(url: str, **body) -> dict[str, object]:
    prompt = {"messages": HELLO} if url == CHAT else {"prompt": "Hello"}
    return {"custom_id": "r-1", "method": "POST", "url": url, "body": {"model": "m", **prompt, **body}}


def bad_line(tmp_path: Path, line: object) -> BadLine:
    item = read_one(tmp_path, line)
    assert isinstance(item, BadLine)
    assert item.format == "openai"
    return item


def test_requests_take_what_they_leave_out_from_the_flags(tmp_path: Path):
    params = SamplingParams(max_new_tokens=9, seed=101)
    assert read_one(tmp_path, request(CHAT)) == InputLine(1, "r-1", HELLO, params, "openai", "m")
    assert read_one(tmp_path, request(TEXT)) == InputLine(1, "r-1", "Hello", params, "openai", "m")


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_options_of_a_request(tmp_path: Path, limit: str):
    options = {limit: 5, "temperature": 1, "top_p": 0.5, "n": 2, "stop": ["a", "b"], "seed": 7}
    item = read_one(tmp_path, request(CHAT, **options, top_k=4, ignore_eos=True, logprobs=True))
    assert item.params == SamplingParams(5, 1.0, 4, 0.5, 7, 2, ("a", "b"), ignore_eos=True, logprobs=True)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("a", "a"), (["a"], "a"), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])],
)
def test_the_forms_of_a_text_prompt(tmp_path: Path, given: object, prompt: object):
    assert read_one(tmp_path, request(TEXT, prompt=given)).prompt == prompt


def test_a_request_for_text_is_no_chat(tmp_path: Path):
    assert read_one(tmp_path, request(TEXT), chat=True, system="Be").prompt == "Hello"
    assert read_one(tmp_path, request(CHAT), chat=True, system="Be").prompt == HELLO


def test_what_changes_nothing_is_accepted(tmp_path: Path):
    delivery = {"user": "u", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_usage": True}}
    neutral = {"stream": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1}
    zero = {"logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "echo": False, "top_logprobs": 0}
    null = dict.fromkeys(("suffix", "temperature", "stop", "n", "logprobs", "anything"))
    assert isinstance(read_one(tmp_path, request(CHAT, **delivery, **neutral, **zero, **null)), InputLine)


@pytest.mark.parametrize(
    "option",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"best_of": 3},
        {"echo": True},
        {"stream": True},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"suffix": "x"},
        {"top_logprobs": 2},
        {"reasoning_effort": "high"},
        {"max_token": 5},  # a slip that would otherwise go unseen
        {"prompt_token_ids": [1]},
    ],
)
def test_what_would_change_the_result_is_refused_by_name(tmp_path: Path, option: dict[str, object]):
    for url in (CHAT, TEXT):
        bad = bad_line(tmp_path, request(url, **option))
        assert (bad.type, bad.id) == ("unsupported_option", "r-1")
        assert next(iter(option)) in bad.message


def test_of_several_unsupported_options_always_the_same_is_named(tmp_path: Path):
    options = {f"option_{letter}": 1 for letter in "hgfedcba"}
    assert "option_a" in bad_line(tmp_path, request(CHAT, **options)).message


@pytest.mark.parametrize(
    ("change", "type", "told"),
    [
        ({"custom_id": None}, "invalid_request", "custom_id is None"),
        ({"custom_id": 5}, "invalid_request", "custom_id is 5"),
        ({"method": "GET"}, "invalid_request", "method is 'GET'"),
        ({"method": None}, "invalid_request", "method is None"),
        ({"url": "/v1/embeddings"}, "invalid_request", "url is '/v1/embeddings'"),
        ({"url": ["/v1/completions"]}, "invalid_request", "url is ['/v1/completions']"),
        ({"body": None}, "invalid_request", "body is None"),
        ({"body": "x"}, "invalid_request", "body is 'x'"),
        ({"body": {}}, "invalid_prompt", "messages is None"),
        ({"body": {"messages": []}}, "invalid_prompt", "messages is []"),
        ({"body": {"messages": HELLO, "prompt": "a"}}, "unsupported_option", "prompt"),
        ({"body": {"messages": HELLO, "model": 5}}, "invalid_option", "model is 5"),
        ({"body": {"messages": HELLO, "n": 0}}, "invalid_option", "n is 0"),
        ({"body": {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}}, "invalid_option", "max_c"),
        ({"body": {"messages": HELLO, "logprobs": 1}}, "invalid_option", "logprobs is 1"),
        ({"url": TEXT, "body": {"prompt": ""}}, "invalid_prompt", "prompt is empty"),
        ({"url": TEXT, "body": {"prompt": []}}, "invalid_prompt", "prompt is []"),
        ({"url": TEXT, "body": {"prompt": [""]}}, "invalid_prompt", "prompt is empty"),
        ({"url": TEXT, "body": {"prompt": [-1]}}, "invalid_prompt", "holds -1"),
        ({"url": TEXT, "body": {"prompt": ["a", "b"]}}, "unsupported_option", "2 prompts"),
        ({"url": TEXT, "body": {"prompt": "a", "logprobs": 3}}, "unsupported_option", "logprobs is 3"),
        ({"url": TEXT, "body": {"prompt": "a", "logprobs": True}}, "invalid_option", "logprobs is True"),
    ],
)
def test_requests_that_cannot_be_served(tmp_path: Path, change: dict[str, object], type: str, told: str):
    bad = bad_line(tmp_path, request(CHAT) | change)
    assert bad.type == type
    assert told in bad.message


def test_the_answer_to_a_chat(tmp_path: Path):
    line = read_one(tmp_path, request(CHAT, n=2))
    answer = record(line, 4, [Completion("Hi", [7, 8, 2], "stop"), Completion("Yo", [9], "length")])
    body = answer["response"]["body"]
    assert isinstance(body.pop("created"), int)
    assert answer == {
        "id": "batch_req_1",
        "custom_id": "r-1",
        "response": {"status_code": 200, "request_id": "req_1", "body": body},
        "error": None,
    }
    choice = {"logprobs": None, "message": {"role": "assistant", "content": "Hi", "refusal": None}}
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {"index": 0, "finish_reason": "stop", **choice},
            {
                "index": 1,
                "finish_reason": "length",
                "logprobs": None,
                "message": {"role": "assistant", "content": "Yo", "refusal": None},
            },
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8},
    }


@pytest.mark.parametrize("prompt", ["Hello", [5, 6]])
def test_the_answer_to_a_text_completion(tmp_path: Path, prompt: object):
    line = read_one(tmp_path, request(TEXT, prompt=prompt))
    body = record(line, 4, [Completion("Hi", [7, 2], "stop")])["response"]["body"]
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, "text": "Hi"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
    }


def test_log_probabilities_are_listed_by_token(tmp_path: Path):
    done = [Completion("Hi", [7, 2], "stop", [-0.5, -1.5])]
    spelled = {7: "Hi", 2: "<eos>"}.__getitem__
    chat = record(read_one(tmp_path, request(CHAT, logprobs=True)), 4, done, spelled)
    assert chat["response"]["body"]["choices"][0]["logprobs"]["content"] == [
        {"token": "Hi", "logprob": -0.5, "bytes": None, "top_logprobs": []},
        {"token": "<eos>", "logprob": -1.5, "bytes": None, "top_logprobs": []},
    ]
    text = record(read_one(tmp_path, request(TEXT, logprobs=0)), 4, done)
    logprobs = text["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:7", "token_id:2"]
    assert logprobs["token_logprobs"] == [-0.5, -1.5]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_answered_as_the_api_would(tmp_path: Path, late: bool):
    if late:
        bad = read_one(tmp_path, request(CHAT)).refused("prompt_too_long", "too long")
    else:
        bad = BadLine(1, "r-1", "prompt_too_long", "too long", "openai")
    error = {"message": "too long", "type": "invalid_request_error", "param": None, "code": "prompt_too_long"}
    assert error_record(bad) == {
        "id": "batch_req_1",
        "custom_id": "r-1",
        "response": {"status_code": 400, "request_id": "req_1", "body": {"error": error}},
        "error": None,
    }
