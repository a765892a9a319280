"""Where a text ends: stop strings, the end-of-sequence token, the length; a script plays the model."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.runner import HostOutput
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.tokenizer import Tokenizer
from tests.support.engines import EOS, byte_level_tokenizer
from tests.unit.test_tokenizer import sentencepiece_backend

SENTENCEPIECE_EOS = 2
VOCABULARY_SIZE = 300  # more than any tokenizer here has


@dataclass
class ScriptedRunner:
    """Gives the token after position p of any sequence the logit 1."""

    script: list[int]
    vocab_size: int
    num_blocks: int = 10
    steps_in_flight: int = 0

    def launch(self, plan):
        logits = torch.zeros(len(plan.logit_rows), self.vocab_size)
        for row, position in zip(logits, plan.positions[plan.logit_rows], strict=True):
            row[self.script[position]] = 1
        return HostOutput(logits if plan.sampling else logits.argmax(-1), plan.sampling)


def generate(script, params, tokenizer=None):
    """Return what becomes of a prompt of one token when the model says the script; a step in flight changes nothing."""
    completion, with_a_step_in_flight = (_generate(script, params, tokenizer, steps) for steps in (0, 1))
    assert completion == with_a_step_in_flight
    return completion


def _generate(script, params, tokenizer, steps_in_flight):
    tokenizer = tokenizer or byte_level_tokenizer()
    engine = Engine(
        SingleCommunicator(),
        ScriptedRunner([*script, *[0] * 100], VOCABULARY_SIZE, steps_in_flight=steps_in_flight),
        Scheduler(BlockPool(10), 1),
        tokenizer,
        context_length=150,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=VOCABULARY_SIZE,
    )
    engine.submit("key", [0], params)
    outcomes = []
    while not engine.is_idle:
        outcomes += engine.step()
    [outcome] = outcomes
    assert outcome.key == "key"
    [completion] = outcome.completions
    assert engine.num_sampled == len(completion.token_ids)
    return completion


def tokens_of(text):
    return byte_level_tokenizer().encode(text)


def sentencepiece():
    backend = sentencepiece_backend()
    tokenizer = Tokenizer(backend, {}, frozenset({SENTENCEPIECE_EOS}), None)
    return tokenizer, {token: backend.token_to_id(token) for token in backend.get_vocab()}


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        (("END",), "one, two ", 12),
        (("two", "END"), "one, ", 8),
        (("wo E", "o"), "", 1),
        (("o EN", "two E"), "one, ", 10),
        ((", two END, three",), "one", 19),
        (("three",), "one, two END, ", 19),
        (("é",), "one, two END, three ", 22),
    ],
)
def test_generation_ends_with_the_stop_string_and_the_text_before_it(stop, text, num_tokens):
    script = tokens_of("one, two END, three é, four")
    completion = generate(script, SamplingParams(60, stop=stop))
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert completion.token_ids == script[:num_tokens]


def test_a_stop_string_that_only_begins_stays_in_the_text():
    script = tokens_of("a STO")
    completion = generate(script, SamplingParams(5, stop=("STOP",)))
    assert (completion.text, completion.finish_reason) == ("a STO", "length")
    completion = generate([*script, EOS], SamplingParams(50, stop=("STOP",)))
    assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("a STO", "stop", EOS)


def test_a_stop_string_in_the_last_token_counts_more_than_the_length():
    completion = generate(tokens_of("a STOP"), SamplingParams(6, stop=("STOP",)))
    assert (completion.text, completion.finish_reason) == ("a ", "stop")


def test_the_prompt_holds_no_stop_string():
    completion = generate(tokens_of("ab"), SamplingParams(2, stop=(byte_level_tokenizer().decode([0]),)))
    assert (completion.text, completion.finish_reason) == ("ab", "length")


@pytest.mark.parametrize(("params", "ends_by_eos"), [(SamplingParams(6), False), (SamplingParams(60), True)])
def test_a_stop_string_in_bytes_held_back_is_found_at_the_end(params, ends_by_eos):
    """With SentencePiece, a line feed is a byte token, whose text is known when another kind of token follows."""
    tokenizer, ids = sentencepiece()
    script = [ids["▁the"], ids["▁cat"], ids["<0x0A>"], ids["▁cat"], ids["▁a"], ids["<0x0A>"]]
    script += [SENTENCEPIECE_EOS] if ends_by_eos else []
    for stop, text in (("\n", "the cat"), ("a\n", "the cat\n cat "), ("cat\n", "the ")):
        completion = generate(script, SamplingParams(params.max_new_tokens, stop=(stop,)), tokenizer)
        assert (completion.text, completion.finish_reason) == (text, "stop")


def test_half_a_character_at_the_end_shows_as_replacement():
    script = tokens_of("aé")[:-1]
    for stop in ((), ("é",)):
        completion = generate(script, SamplingParams(2, stop=stop))
        assert (completion.text, completion.finish_reason) == ("a\N{REPLACEMENT CHARACTER}", "length")


def test_special_tokens_are_not_in_the_text_and_end_nothing_when_ignored():
    script = [*tokens_of("a"), EOS, *tokens_of("b")]
    ended = generate(script, SamplingParams(3))
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("a", script[:2], "stop")
    ignored = generate(script, SamplingParams(3, ignore_eos=True))
    assert (ignored.text, ignored.token_ids, ignored.finish_reason) == ("ab", script, "length")
    stopped = generate(script, SamplingParams(50, ignore_eos=True, stop=("ab",)))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == ("", script, "stop")


def test_log_probabilities_stand_beside_every_token():
    script = [*tokens_of("ab"), EOS]
    completion = generate(script, SamplingParams(50, logprobs=True))
    expected = np.log(np.e / (np.e + VOCABULARY_SIZE - 1))
    np.testing.assert_allclose(completion.logprobs, [expected] * 3, rtol=1e-6)
