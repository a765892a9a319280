"""Sampling on the device is sampling on the host, token for token."""

import numpy as np
import pytest
import torch

from mpi_tp.engine import device_sampler, sampler
from mpi_tp.engine.step import SamplingRows

ROWS = 1500
VOCABULARY = 120


def on_device(rows: SamplingRows) -> device_sampler.SamplingTensors:
    return device_sampler.SamplingTensors(
        *map(torch.from_numpy, (rows.temperature, rows.top_k, rows.top_p, rows.uniform)),
        filters=bool((rows.top_k > 0).any() or (rows.top_p < 1).any()),
        logprobs=rows.logprobs,
    )


def random_rows(rng: np.random.Generator, count: int, filters: bool) -> SamplingRows:
    """Temperatures from greedy to uniform; the smallest and the largest random numbers come up too."""
    off = not filters
    return SamplingRows(
        temperature=rng.choice([0, 1e-30, 0.3, 1, 2, 3e38], count).astype(np.float32),
        top_k=np.where(off, 0, rng.choice([0, 0, 1, 2, 7, 119, 120, 2**31 - 1], count)).astype(np.int32),
        top_p=np.where(off, 1, rng.choice([1, 1, 1e-30, 0.1, 0.5, 0.9, 0.999], count)).astype(np.float32),
        uniform=np.where(rng.random(count) < 0.1, rng.choice([0, 1 - 2.0**-53], count), rng.random(count)),
        logprobs=True,
    )


def random_logits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Steps of 1/4 have many equals; minus infinity is an impossible token."""
    logits = rng.standard_normal((count, VOCABULARY)) * rng.choice([0.1, 1, 8], (count, 1))
    stepped = rng.random((count, 1)) < 0.5
    logits = np.where(stepped, np.round(logits * 4) / 4, logits)
    impossible = rng.random((count, VOCABULARY)) < rng.choice([0, 0.5, 0.97], (count, 1))
    impossible[:, 17] = False
    return np.where(impossible, -np.inf, logits).astype(np.float32)


def some(rows: SamplingRows, at: slice) -> SamplingRows:
    return SamplingRows(rows.temperature[at], rows.top_k[at], rows.top_p[at], rows.uniform[at], rows.logprobs)


@pytest.mark.parametrize("filters", [False, True])
def test_tokens_and_log_probabilities_are_the_hosts(filters):
    rng = np.random.default_rng(filters)
    logits, rows = random_logits(rng, ROWS), random_rows(rng, ROWS, filters)
    tokens, logprobs = device_sampler.sample(torch.from_numpy(logits), on_device(rows))
    with np.errstate(over="ignore"):
        host = sampler.sample(logits, rows)
    assert (tokens.numpy() == host.tokens).all()
    # Both are computed in float64 and rounded once, to neighbours at most.
    np.testing.assert_allclose(logprobs.numpy(), host.logprobs, rtol=2**-23, atol=1e-15)
    assert len(np.unique(host.tokens)) == VOCABULARY


@pytest.mark.parametrize("filters", [False, True])
def test_a_row_alone_gives_what_it_gives_in_a_batch(filters):
    rng = np.random.default_rng(filters)
    logits, rows = random_logits(rng, 200), random_rows(rng, 200, filters)
    tokens, logprobs = device_sampler.sample(torch.from_numpy(logits), on_device(rows))
    for row in range(200):
        at = slice(row, row + 1)
        alone = device_sampler.sample(torch.from_numpy(logits[at]), on_device(some(rows, at)))
        assert (alone[0], alone[1]) == (tokens[row], logprobs[row])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [np.nan, np.inf], [-np.inf] * VOCABULARY])
def test_logits_that_are_no_numbers_spoil_their_own_row_only(bad, filters):
    rng = np.random.default_rng(4)
    logits, rows = random_logits(rng, 40), random_rows(rng, 40, filters)
    clean = device_sampler.sample(torch.from_numpy(logits), on_device(rows))
    logits[5, : len(bad)] = logits[31, -len(bad) :] = bad
    tokens, logprobs = device_sampler.sample(torch.from_numpy(logits), on_device(rows))
    assert (tokens[5], tokens[31]) == (-1, -1)
    others = [row for row in range(40) if row not in (5, 31)]
    assert torch.equal(tokens[others], clean[0][others])
    assert torch.equal(logprobs[others], clean[1][others])
    with np.errstate(over="ignore"):
        assert (sampler.sample(logits, rows).tokens == tokens.numpy()).all()


def test_logits_of_half_precision_are_widened_first():
    rng = np.random.default_rng(2)
    logits, rows = torch.from_numpy(random_logits(rng, 64)).bfloat16(), random_rows(rng, 64, filters=True)
    with np.errstate(over="ignore"):
        host = sampler.sample(logits.float().numpy(), rows)
    assert (device_sampler.sample(logits, on_device(rows))[0].numpy() == host.tokens).all()
