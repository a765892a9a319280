"""The engine over rank threads: whole requests, against transformers and against itself in other surroundings."""

import functools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.engine.request import SamplingParams
from tests.support.engines import EOS, PipelinedRunner, RecordingRunner, Setting, byte_level_tokenizer, serve
from tests.support.tiny import tiny_model

PROMPTS = [[1, 2, 3], list(range(40, 75)), [255], [7] * 16, [9, 11, 13, 200] * 9]
RANKS = (1, 2, 3, 4)
FREE = frozenset()


@functools.cache
def setting(name="llama3-rope", **changes):
    return replace(Setting(tiny_model(name)), **changes)


def greedy(count, **options):
    return SamplingParams(max_new_tokens=count, **options)


def token_ids(outcomes):
    return [[completion.token_ids for completion in outcome.completions] for outcome in outcomes]


@functools.cache
def alone(prompt, params, eos=frozenset({EOS})):
    """Return what one prompt gives when nothing else runs."""
    [outcome] = serve(setting(eos_token_ids=eos), [(list(prompt), params)])
    [completion] = outcome.completions
    return completion


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(("name", "strategy"), [("llama3-rope", "column_wise"), ("qwen3", "paired")])
def test_greedy_tokens_are_those_of_transformers(name, strategy, size):
    here = setting(name, strategy=strategy, eos_token_ids=FREE)
    lengths = [20, 5, 12, 30, 1]
    outcomes = serve(here, [(prompt, greedy(n)) for prompt, n in zip(PROMPTS, lengths, strict=True)], size)
    for prompt, length, outcome in zip(PROMPTS, lengths, outcomes, strict=True):
        with torch.no_grad():
            theirs = here.model.generate(
                torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert token_ids([outcome]) == [[theirs[0, len(prompt) :].tolist()]]
        assert outcome.prompt_tokens == len(prompt)
        assert outcome.completions[0].finish_reason == "length"


@pytest.mark.parametrize("params", [SamplingParams(20, 1.0, n=3), SamplingParams(20, 2.0, top_k=50, top_p=0.9, n=2)])
def test_samples_are_the_same_at_any_rank_count_and_in_any_batch(params):
    requests = [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    first = token_ids(serve(setting(), requests))
    for size in RANKS:
        assert token_ids(serve(setting(max_batch_size=3), requests, size)) == first
    assert token_ids(serve(setting(), requests[::-1]))[::-1] == first
    for prompt_samples in first:
        assert len(set(map(tuple, prompt_samples))) == params.n
    other_seeds = [(prompt, replace(own, seed=own.seed + 100)) for prompt, own in requests]
    assert token_ids(serve(setting(), other_seeds)) != first


def test_a_sample_is_the_same_whatever_n_is():
    [many] = serve(setting(), [(PROMPTS[0], SamplingParams(10, 1.0, n=4))])
    [few] = serve(setting(), [(PROMPTS[0], SamplingParams(10, 1.0, n=2))])
    assert few.completions == many.completions[:2]


def test_more_prompts_than_the_cache_holds():
    requests = [(PROMPTS[at % 5], SamplingParams(10 + at, 1.0, seed=at)) for at in range(12)]
    crowded = serve(setting(num_blocks=5, max_batch_size=64), requests, 2)
    assert token_ids(crowded) == token_ids(serve(setting(num_blocks=200, max_batch_size=64), requests))


def test_prompts_run_in_chunks_give_the_same():
    requests = [(prompt, SamplingParams(10, 1.0, seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    whole = serve(setting(), requests, 2)
    assert token_ids(serve(setting(max_step_tokens=7), requests, 2)) == token_ids(whole)


def test_log_probabilities_are_those_of_the_raw_logits():
    params = SamplingParams(8, temperature=0.7, top_k=5, seed=3, logprobs=True)
    [outcome] = serve(setting(eos_token_ids=FREE), [(PROMPTS[1], params)], 3)
    [completion] = outcome.completions
    assert completion.logprobs is not None
    with torch.no_grad():
        logits = setting().model(torch.tensor([PROMPTS[1] + completion.token_ids])).logits[0, len(PROMPTS[1]) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(8), completion.token_ids]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-4)
    assert serve(setting(), [(PROMPTS[1], greedy(2))])[0].completions[0].logprobs is None


def test_an_end_of_sequence_token_ends_and_is_counted():
    tokens = alone((1, 2, 3), greedy(20), FREE).token_ids
    eos = tokens[6]
    first = tokens.index(eos)
    ended = alone((1, 2, 3), greedy(20), frozenset({eos, EOS}))
    assert (ended.token_ids, ended.finish_reason) == (tokens[: first + 1], "stop")
    ignored = alone((1, 2, 3), greedy(20, ignore_eos=True), frozenset({eos}))
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")
    at_the_limit = alone((1, 2, 3), greedy(first + 1), frozenset({eos}))
    assert (at_the_limit.token_ids, at_the_limit.finish_reason) == (tokens[: first + 1], "stop")


def test_the_text_is_that_of_the_tokens():
    completion = alone((1, 2, 3), greedy(20))
    assert completion.text == byte_level_tokenizer().decode(completion.token_ids)
    [outcome] = serve(setting(tokenizer=None), [([1, 2, 3], greedy(20))])
    assert (outcome.completions[0].token_ids, outcome.completions[0].text) == (completion.token_ids, "")


def test_a_text_prompt_is_encoded():
    ids = byte_level_tokenizer().encode("hello")
    assert len(ids) == 5
    by_text, by_ids = serve(setting(), [("hello", greedy(9)), (ids, greedy(9))])
    assert by_text.completions == by_ids.completions


def test_token_ids_may_be_numbers_of_numpy():
    from_array, from_list = serve(setting(), [(np.array([1, 2, 3]), greedy(9)), ([1, 2, 3], greedy(9))])
    assert from_array.completions == from_list.completions


def test_generation_ends_where_the_context_does():
    short = setting(context_length=40, eos_token_ids=FREE)
    outcomes = serve(short, [(list(range(39)), greedy(10)), (list(range(30)), greedy(1000)), ([5] * 40, greedy(1))])
    assert [len(o.completions[0].token_ids) for o in outcomes[:2]] == [1, 10]
    assert [o.completions[0].finish_reason for o in outcomes[:2]] == ["length", "length"]
    assert outcomes[2].error is not None


BAD_REQUESTS = [
    ([], {}, "empty_prompt", "no tokens"),
    ([1, 257], {}, "unknown_token", "257 is not in the vocabulary of 257"),
    ([-1], {}, "unknown_token", "-1 "),
    ([1] * 256, {}, "prompt_too_long", "256 tokens and the context holds 256"),
    ([1] * 100, {"max_new_tokens": 100}, "cache_too_small", "200 tokens and .* holds 160: raise --kv-memory"),
    ([{"role": "user", "content": "hi"}], {}, "invalid_prompt", "no chat template"),
    ([[1, 2], [3]], {}, "invalid_prompt", "text, a list of messages or a list of token ids"),
]


def test_a_bad_request_fails_alone():
    good = [(prompt, greedy(6)) for prompt in PROMPTS]
    bad = [(prompt, SamplingParams(**options)) for prompt, options, _, _ in BAD_REQUESTS]
    mixed = [request for pair in zip(bad, [*good, *good], strict=False) for request in pair]
    outcomes = serve(setting(num_blocks=10), mixed, 2)
    expected = token_ids(serve(setting(), good))
    assert token_ids(outcomes[1::2]) == [*expected, *expected][: len(bad)]
    for outcome, (_, _, kind, message) in zip(outcomes[::2], BAD_REQUESTS, strict=True):
        assert outcome.completions == []
        assert outcome.error is not None
        assert outcome.error.type == kind
        with pytest.raises(type(outcome.error), match=message):
            raise outcome.error


def test_without_tokenizer_text_and_stop_strings_are_refused():
    requests = [("text", greedy(1)), ([1], greedy(1, stop=("x",))), ([1], greedy(1))]
    outcomes = serve(setting(tokenizer=None), requests)
    assert [outcome.error and outcome.error.type for outcome in outcomes] == ["no_tokenizer", "no_tokenizer", None]


@pytest.mark.parametrize("runner", [RecordingRunner, PipelinedRunner])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logits_that_are_no_numbers_fail_their_request_alone(temperature, runner):
    requests = [
        ([1, 2, 3], greedy(6, temperature=temperature)),
        ([4, 66], greedy(6, n=2)),
        ([7] * 9, greedy(6, logprobs=temperature > 0)),
    ]
    clean = serve(setting(eos_token_ids=FREE), requests, 2)
    assert 66 not in [token for outcome in clean[::2] for token in outcome.completions[0].token_ids]
    spoiled = serve(setting(eos_token_ids=FREE, spoil=66, runner=runner), requests, 2)
    assert token_ids(spoiled[::2]) == token_ids(clean[::2])
    assert spoiled[1].error is not None
    assert spoiled[1].error.type == "model_failure"


def test_a_request_that_just_fits_the_cache_is_served():
    [outcome] = serve(setting(num_blocks=2, eos_token_ids=FREE), [([1] * BLOCK_SIZE, greedy(BLOCK_SIZE))])
    assert len(outcome.completions[0].token_ids) == BLOCK_SIZE


def test_a_refusal_reaches_other_processes_as_it_is():
    [outcome] = serve(setting(), [([], greedy(1))])
    received = pickle.loads(pickle.dumps(outcome)).error
    assert (received.type, str(received)) == ("empty_prompt", "the prompt has no tokens")
