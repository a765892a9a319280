"""The choice of the next token: what may be chosen, with which probability, and what it depends on."""

import numpy as np
import pytest
import torch

from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.sampler import choose_token, find_candidates, log_probability, sample
from mpi_tp.engine.step import SamplingRows
from mpi_tp.engine.uniform_stream import UniformStream
from mpi_tp.errors import UsageError

DRAWS = 4000


def random_logits(size=50, seed=0):
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


def draws(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Return the tokens chosen at many positions."""
    uniforms = UniformStream(0, 0)
    return [choose_token(logits, temperature, top_k, top_p, uniforms.at(position)) for position in range(DRAWS)]


def reference(logits, temperature=1.0, top_k=None, top_p=None):
    """Return every token's probability, by the definitions of top-k and then top-p."""
    probabilities = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, -1).numpy()
    kept = sorted(range(len(logits)), key=lambda token: -probabilities[token])[:top_k]
    if top_p is not None and top_p < 1:
        sums = probabilities[kept].cumsum()
        kept = kept[: next(count for count, share in enumerate(sums / sums[-1]) if share >= top_p) + 1]
    result = np.zeros(len(logits))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id():
    logits = np.array([1, 3, 3, -np.inf, 3, 0], np.float32)
    assert choose_token(logits, temperature=0, top_k=0, top_p=1, uniform=0.9) == 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.6},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"top_k": 8, "top_p": 0.7, "temperature": 1.5},
        {"top_k": 1, "temperature": 2.0},
    ],
)
def test_tokens_come_with_their_probability_and_no_others_come(params):
    logits = random_logits()
    expected = reference(logits, **params)
    counts = np.bincount(draws(logits, **params), minlength=len(logits))
    assert not counts[expected == 0].any()
    standard_errors = np.sqrt(expected * (1 - expected) / DRAWS)
    assert np.all(np.abs(counts / DRAWS - expected) <= 5 * standard_errors + 1e-9)


@pytest.mark.parametrize("top_k", [None, 1, 7, 300, 500])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_candidates_are_those_of_the_sorted_vocabulary(spread, top_p, top_k):
    """Logits in steps of 1/8 have many equals."""
    for seed in range(3):
        logits = np.round(random_logits(500, seed) * spread * 8) / 8
        candidates, cumulative = find_candidates(logits, 1.0, top_k or 0, top_p or 1.0)
        expected = reference(logits, top_k=top_k, top_p=top_p)
        assert set(candidates) == set(np.flatnonzero(expected))
        np.testing.assert_allclose(cumulative / cumulative[-1], expected[candidates].cumsum(), rtol=1e-12)


def test_top_k_keeps_the_lower_ids_of_equals():
    assert set(draws(np.zeros(6, np.float32), top_k=2)) == {0, 1}


def test_top_p_keeps_the_token_that_reaches_it():
    """Of probabilities 1/2, 1/4, 1/8, 1/8, p = 0.75 is reached with the second, and any more needs the third."""
    logits = np.log2([0.125, 0.5, 0.125, 0.25]).astype(np.float32) * np.float32(np.log(2))
    assert set(draws(logits, top_p=0.74)) == {1, 3}
    assert set(draws(logits, top_p=0.76)) == {1, 3, 0}


def test_impossible_tokens_are_never_chosen():
    logits = np.full(10, -np.inf, np.float32)
    logits[[2, 9]] = 0
    for params in ({}, {"top_k": 5}, {"top_p": 1.0}):
        assert set(draws(logits, **params)) == {2, 9}


@pytest.mark.parametrize("temperature", [1e-320, 1e-12])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = random_logits()
    with np.errstate(over="ignore"):
        assert set(draws(logits, temperature=temperature)) == {int(logits.argmax())}


def test_huge_temperatures_are_uniform_and_huge_logits_no_problem():
    logits = np.array([3e38, -3e38, 3e38, 0], np.float32)
    assert set(draws(logits)) == {0, 2}
    counts = np.bincount(draws(random_logits(4), temperature=1e300), minlength=4)
    assert counts.min() > DRAWS / 4 * 0.8


@pytest.mark.parametrize(("seed", "number"), [(0, 0), (3, 1), (-1, 0), (2**63, 5), (2**70 + 7, 16383)])
def test_a_random_number_is_that_of_its_position(seed, number):
    """Against numpy's own generator, started at each position."""
    expected = [
        np.random.Generator(
            np.random.Philox(key=np.array([seed % 2**64, number], np.uint64), counter=position)
        ).random()
        for position in range(400)
    ]
    in_order = UniformStream(seed, number)
    assert [in_order.at(position) for position in range(400)] == expected
    late = UniformStream(seed, number)
    order = [399, 5, 70, 69, 68, 200]
    assert [late.at(position) for position in order] == [expected[position] for position in order]


def test_seeds_and_samples_have_numbers_of_their_own():
    streams = [UniformStream(*key) for key in ((3, 0), (4, 0), (3, 1), (-1, 0), (2**63, 0), (2**63 - 1, 0))]
    assert len({stream.at(position) for stream in streams for position in range(100)}) == 600


def rows_of(*rows, logprobs=False):
    """Return how rows are sampled, each given by temperature, top_k, top_p and random number."""
    temperature, top_k, top_p, uniform = zip(*rows, strict=True)
    return SamplingRows(
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(uniform),
        logprobs,
    )


def test_rows_are_sampled_each_in_its_own_way():
    logits = np.stack([random_logits(500, seed) for seed in range(4)])
    options = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.3), (0.5, 20, 0.75, 0.8), (2.0, 0, 0.5, 0.99)]
    sampled = sample(logits, rows_of(*options, logprobs=True))
    assert sampled.tokens.dtype == np.int64
    assert sampled.tokens.tolist() == [choose_token(own, *one) for own, one in zip(logits, options, strict=True)]
    assert sampled.logprobs.dtype == np.float32
    assert sampled.logprobs.tolist() == [log_probability(*one) for one in zip(logits, sampled.tokens, strict=True)]
    assert sample(logits, rows_of(*options)).logprobs is None


@pytest.mark.parametrize("wrong", [[np.nan, 0, 1], [0, np.inf, 1], [-np.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_token(temperature, wrong):
    logits = np.array([[0, 1, -np.inf], wrong, [2, 1, 0]], np.float32)
    sampled = sample(logits, rows_of(*[(temperature, 1, 1.0, 0.5)] * 3, logprobs=True))
    assert sampled.tokens.tolist() == [1, -1, 0]
    assert np.isfinite(sampled.logprobs).all()


def test_log_probability_is_the_log_softmax():
    logits = random_logits(300)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    for token in (0, 17, 299):
        found = log_probability(logits, token)
        assert found == np.float32(found)
        assert found == pytest.approx(expected[token].item(), rel=1e-7)


def test_log_probability_of_huge_logits():
    assert log_probability(np.array([3e38, -3e38, 3e38], np.float32), 2) == np.float32(-np.log(2))
    assert log_probability(np.array([0, -np.inf], np.float32), 0) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("n", 0),
        ("stop", ("a", "")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"^{name} is .*: it must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("wrong", [{"stop": "END"}, {"stop": ("",)}, {"top_k": 2.5}, {"n": 1.5}, {"seed": None}])
def test_params_of_the_wrong_type_are_refused(wrong):
    """A single text as `stop` would else mean its letters."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)
