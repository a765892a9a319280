"""Whole models, split over ranks, against transformers' single-device ones."""

import pytest
import torch

from mpi_tp.comm.threads import run_ranks
from mpi_tp.kernels import select
from mpi_tp.partition.plan import STRATEGIES
from tests.support.parallel import all_logits
from tests.support.tiny import TINY_CONFIGS, hf_config, hf_weights, tiny_model

PROMPTS = [[1, 2, 3], list(range(40, 75)), [256], [7, 7, 7, 7, 7, 7, 7, 7, 9, 11, 13]]
RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_logits_equal_transformers(name, strategy, numerics):
    model = tiny_model(name)
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    kernels = select(torch.device("cpu"), numerics, torch.float32)
    for size in RANKS:
        for logits in run_ranks(
            size,
            lambda comm: all_logits(hf_config(model), hf_weights(model), comm, kernels, strategy, PROMPTS, chunk=64),
        ):
            for ours, theirs in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_prefill_token_by_token_equals_whole(numerics):
    model = tiny_model("llama3-rope")
    kernels = select(torch.device("cpu"), numerics, torch.float32)
    arguments = (hf_config(model), hf_weights(model))
    [whole] = run_ranks(1, lambda comm: all_logits(*arguments, comm, kernels, "column_wise", PROMPTS, chunk=64))
    [stepped] = run_ranks(1, lambda comm: all_logits(*arguments, comm, kernels, "column_wise", PROMPTS, chunk=1))
    for one, other in zip(whole, stepped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
