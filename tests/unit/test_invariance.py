"""The headline: with `column_wise` and invariant numerics, the bits of a result depend on prompt and weights only."""

import functools

import pytest
import torch

from mpi_tp.comm.threads import run_ranks
from mpi_tp.kernels import select
from tests.support.parallel import all_logits
from tests.support.tiny import TINY_CONFIGS, hf_config, hf_weights, tiny_model

PROMPTS = [[1, 2, 3], list(range(40, 75)), [256], [7] * 8 + [9, 11, 13]] + [
    [5 * i, i + 1, 100] * i for i in range(1, 13)
]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def logits_at(model, size, prompts, chunk=64):
    kernels = select(CPU, "invariant", model.dtype)
    config, weights = hf_config(model), hf_weights(model)
    ranks = run_ranks(
        size, lambda comm: all_logits(config, weights, comm, kernels, "column_wise", prompts, chunk=chunk)
    )
    for other in ranks[1:]:
        assert all(torch.equal(one, two) for one, two in zip(ranks[0], other, strict=True))
    return ranks[0]


@functools.cache
def single_rank(name, dtype):
    model = tiny_model(name, dtype)
    return model, logits_at(model, 1, PROMPTS)


def assert_same_bits(ours, reference):
    for index, (one, other) in enumerate(zip(ours, reference, strict=True)):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), f"prompt {index} differs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_any_rank_count_gives_the_same_bits(name, dtype):
    model, reference = single_rank(name, dtype)
    for size in range(2, model.config.num_attention_heads + 1):
        assert_same_bits(logits_at(model, size, PROMPTS), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_any_batch_gives_the_same_bits(name, dtype):
    model, reference = single_rank(name, dtype)
    alone = [logits_at(model, 1, [prompt])[0] for prompt in PROMPTS]
    assert_same_bits(alone, reference)
    for batch in (3, 7):
        batched = []
        for start in range(0, len(PROMPTS), batch):
            batched += logits_at(model, 2, PROMPTS[start : start + batch])
        assert_same_bits(batched, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5])
def test_any_schedule_gives_the_same_bits(chunk, dtype):
    model, reference = single_rank("llama3-rope", dtype)
    assert_same_bits(logits_at(model, 3, PROMPTS, chunk=chunk), reference)
