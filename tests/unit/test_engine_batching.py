"""Continuous batching changes nothing: what a request gets does not depend on what else runs, or on how it is run."""

import functools
import gc
import random
import tracemalloc
from dataclasses import replace

import pytest
import torch

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.runner import HostOutput
from mpi_tp.engine.scheduler import Scheduler
from tests.support.engines import PipelinedRunner, RecordingRunner, Setting, serve, serve_some
from tests.support.tiny import tiny_model

NUM_REQUESTS = 200
RUNNERS = [RecordingRunner, PipelinedRunner]
BEGINNINGS = [[], list(range(40, 60)), [*range(40, 56), *range(90, 120)], [3] * 32]


@functools.cache
def setting(**changes):
    return replace(Setting(tiny_model("qwen3-biases"), eos_token_ids=frozenset(range(0, 257, 16))), **changes)


def mixed_request(generator):
    prompt = generator.choice(BEGINNINGS) + [generator.randrange(256) for _ in range(generator.randint(1, 12))]
    params = SamplingParams(
        max_new_tokens=generator.choice([1, 2, 5, 12, 40]),
        temperature=generator.choice([0, 0, 0.7, 2.0]),
        top_k=generator.choice([None, 1, 40]),
        top_p=generator.choice([None, 0.5, 0.95]),
        seed=generator.randrange(1000),
        n=generator.choice([1, 1, 1, 2, 3]),
        stop=generator.choice([(), (), tuple("aeiou"), ("\ufffd\ufffd",)]),
        ignore_eos=generator.choice([True, False]),
        logprobs=generator.choice([True, False]),
    )
    return prompt, params


@functools.cache
def mixed_requests():
    generator = random.Random(1)
    return [mixed_request(generator) for _ in range(NUM_REQUESTS)]


@functools.cache
def outcomes_alone():
    return [serve(setting(), [request])[0] for request in mixed_requests()]


CROWDED = {"num_blocks": 8, "max_batch_size": 6, "max_step_tokens": 24}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_crowd_gets_what_each_gets_alone(size, runner):
    """Bit for bit, with log-probabilities, under preemption, sharing, chunks and requests that are cancelled."""
    generator = random.Random(size)
    cancel_at = {key: generator.randrange(1, 500) for key in generator.sample(range(NUM_REQUESTS), 40)}
    served = serve_some(setting(runner=runner, **CROWDED), mixed_requests(), size, cancel_at)
    for key, alone in enumerate(outcomes_alone()):
        if key in served.outcomes:
            assert replace(served.outcomes[key], key=0) == alone
        else:
            assert key in cancel_at
    assert 10 < NUM_REQUESTS - len(served.outcomes) <= 40
    assert served.num_preemptions > 2
    assert served.prefix_hit_tokens > 1000


@pytest.mark.parametrize("runner", RUNNERS)
def test_samples_compute_their_prompt_once(runner):
    prompt = list(range(40))
    request = prompt, SamplingParams(5, temperature=1.0, n=4, ignore_eos=True)
    served = serve_some(setting(runner=runner), [request, (prompt[:33], SamplingParams(2))], 2, {})
    assert served.prefix_hit_tokens == 4 * 32
    assert served.outcomes[0] == serve(setting(), [request])[0]


class Talker:
    """Says token 3 always, and counts the tokens of its steps."""

    num_blocks = 40

    def __init__(self, steps_in_flight):
        self.steps_in_flight = steps_in_flight
        self.steps = []

    def launch(self, plan):
        self.steps.append(len(plan.ids))
        return HostOutput(torch.full((len(plan.logit_rows),), 3), None)


def talking_engine(steps_in_flight, eos=()):
    runner = Talker(steps_in_flight)
    scheduler = Scheduler(BlockPool(runner.num_blocks), 8)
    fields = {"context_length": 100, "eos_token_ids": frozenset(eos), "vocab_size": 10_000}
    return Engine(SingleCommunicator(), runner, scheduler, None, **fields), runner


def run_to_end(engine):
    outcomes = []
    while not engine.is_idle:
        outcomes += engine.step()
    return outcomes


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_a_step_too_many_only_where_an_end_of_sequence_is_seen_late(steps_in_flight):
    engine, runner = talking_engine(steps_in_flight)
    engine.submit("by length", [1] * 5, SamplingParams(4))
    [outcome] = run_to_end(engine)
    assert (outcome.completions[0].token_ids, engine.num_sampled, runner.steps) == ([3] * 4, 4, [5, 1, 1, 1])
    engine, runner = talking_engine(steps_in_flight, eos=[3])
    engine.submit("by token", [1] * 5, SamplingParams(4))
    [outcome] = run_to_end(engine)
    assert (outcome.completions[0].token_ids, engine.num_sampled) == ([3], 1)
    assert runner.steps == [5] + [1] * steps_in_flight
    assert engine.blocks_in_use == 0
    assert engine.step() == []


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_a_cancelled_request_leaves_and_its_key_is_free_again(steps_in_flight):
    engine, _ = talking_engine(steps_in_flight)
    engine.submit("stays", [1] * 20, SamplingParams(6))
    engine.submit("goes", [2] * 20, SamplingParams(60, n=2))
    assert engine.step() == []
    engine.cancel("goes")
    assert (engine.num_running, engine.num_waiting, engine.blocks_in_use) == (1, 0, 2)
    engine.submit("goes", [4] * 2, SamplingParams(2))
    outcomes = {outcome.key: outcome for outcome in run_to_end(engine)}
    assert {key: outcome.completions[0].token_ids for key, outcome in outcomes.items()} == {
        "stays": [3] * 6,
        "goes": [3] * 2,
    }
    engine.cancel("goes")
    engine.cancel("never came")
    assert engine.is_idle
    assert engine.blocks_in_use == 0


def test_a_request_cancelled_when_one_of_its_samples_is_done():
    engine, _ = talking_engine(0)
    engine.submit("key", [1] * 95, SamplingParams(5, n=9))
    while engine.num_waiting:
        assert engine.step() == []
    engine.cancel("key")
    assert engine.is_idle
    assert engine.blocks_in_use == 0


def test_memory_does_not_grow_with_the_requests_served():
    engine, _ = talking_engine(steps_in_flight=1)
    generator = random.Random(0)

    def serve_many(count):
        """Return what is allocated after serving so many more; one in ten is cancelled."""
        for key in range(count):
            prompt = [generator.randrange(10_000) for _ in range(generator.randint(1, 40))]
            engine.submit(key, prompt, SamplingParams(3, temperature=key % 2))
            if key % 10 == 0:
                engine.cancel(key - 5)
            while engine.num_waiting > 8:
                engine.step()
        run_to_end(engine)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve_many(500)
        assert serve_many(10_000) - before < 500_000  # the smallest object that each of them left would be more
    finally:
        tracemalloc.stop()
