"""The engine on one GPU: what a request gives depends on nothing around it, and is what transformers gives."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="no Triton, which comes with torch for CUDA")

from mpi_tp.engine.request import SamplingParams
from tests.support.engines import Request, Setting
from tests.support.gpu_engine import GpuServer
from tests.support.tiny import TINY_CONFIGS, tiny_model

NUM_REQUESTS = 40


@functools.cache
def setting(name: str, dtype: torch.dtype) -> Setting:
    """Room for all requests at once; answers run to their length."""
    return Setting(
        tiny_model(name, dtype), num_blocks=512, max_batch_size=NUM_REQUESTS, eos_token_ids=frozenset(), tokenizer=None
    )


def mixed_requests(count: int) -> list[Request]:
    """Greedy and sampled ones, of prompts of 1 to 100 tokens; every fourth begins as the one before."""
    rng = np.random.default_rng(7)
    prompts: list[list[int]] = []
    for at in range(count):
        start = prompts[-1][:60] if at % 4 == 3 else []
        prompts.append(start + rng.integers(0, 257, int(rng.integers(1, 100 - len(start)))).tolist())
    kinds = [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 20}, {"temperature": 1.5, "top_p": 0.8, "n": 2}]
    return [
        (prompt, SamplingParams(int(rng.integers(1, 80)), seed=at, logprobs=True, **kinds[at % len(kinds)]))
        for at, prompt in enumerate(prompts)
    ]


REQUESTS = mixed_requests(NUM_REQUESTS)


# One family in float32 is enough: the others differ in what does not depend on the dtype, and compile for minutes.
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.bfloat16) for name in TINY_CONFIGS] + [("mistral-window", torch.float32)], ids=str
)
def test_a_request_gives_the_same_bits_in_any_surroundings(name, dtype, device):
    here = setting(name, dtype)
    expected = [outcome.completions for outcome in GpuServer(here, device, invariant=True).serve(REQUESTS)]
    one_at_a_time = GpuServer(here, device, invariant=True)
    assert [one_at_a_time.serve([request])[0].completions for request in REQUESTS] == expected
    crowded = GpuServer(replace(here, num_blocks=20), device, invariant=True)
    assert [outcome.completions for outcome in crowded.serve(REQUESTS)] == expected
    assert crowded.engine.num_preemptions
    piecewise = GpuServer(
        replace(here, max_batch_size=7, max_step_tokens=19), device, invariant=True, uses_graphs=False
    )
    assert [outcome.completions for outcome in piecewise.serve(REQUESTS)] == expected


def test_greedy_requests_alone_take_the_way_without_logits(device):
    """Neither sampled rows nor log-probabilities in a step: only each row's best token leaves the device."""
    greedy = [(prompt, SamplingParams(params.max_new_tokens)) for prompt, params in REQUESTS]
    with_logits = [(prompt, replace(params, logprobs=True)) for prompt, params in greedy]
    here = setting("llama3-rope", torch.bfloat16)
    tokens = [
        [outcome.completions[0].token_ids for outcome in server.serve(requests)]
        for server, requests in (
            (GpuServer(here, device, invariant=True), greedy),
            (GpuServer(here, device, invariant=True, uses_graphs=False), greedy),
            (GpuServer(replace(here, max_batch_size=1), device, invariant=True), greedy),
            (GpuServer(here, device, invariant=True), with_logits),
        )
    ]
    assert tokens[1:] == tokens[:1] * 3


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_float32_log_probabilities_are_those_of_transformers(name, device):
    """With `fast`; one request alone and many, so that every way through the products is taken."""
    here = setting(name, torch.float32)
    server = GpuServer(here, device, invariant=False)
    for requests in (REQUESTS[:1], REQUESTS[:12]):
        for (prompt, params), outcome in zip(requests, server.serve(requests), strict=True):
            for completion in outcome.completions:
                with torch.no_grad():
                    logits = here.model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
                theirs = torch.log_softmax(logits.double(), -1)
                chosen = theirs[torch.arange(len(theirs)), completion.token_ids]
                np.testing.assert_allclose(completion.logprobs, chosen, rtol=1e-4, atol=1e-4)
                if not params.temperature:
                    assert (theirs.max(-1).values - chosen).max() < 1e-4
