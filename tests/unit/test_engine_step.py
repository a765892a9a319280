"""The plan of a step: the packed tokens, where they stand, and how the next ones are sampled."""

import numpy as np

from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.sequence import Chunk, Sequence
from mpi_tp.engine.step import plan_step

PROMPT = list(range(100, 120))


def sequence_of(prompt, *blocks, **params):
    sequence = Sequence(SamplingParams(**params), 0, list(prompt), len(prompt), 100)
    sequence.blocks = np.array(blocks, np.int32)
    return sequence


def test_a_plan_says_where_every_token_stands():
    first, second = sequence_of(PROMPT, 5, 2), sequence_of([1, 2, 3], 9)
    plan = plan_step([Chunk(first, 14, 18, False), Chunk(second, 0, 3, True)], BLOCK_SIZE)
    assert plan.ids.tolist() == [*PROMPT[14:18], 1, 2, 3]
    assert plan.positions.tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert plan.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert plan.slots.tolist() == [5 * 16 + 14, 5 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16, 9 * 16 + 1, 9 * 16 + 2]
    assert plan.block_tables.tolist() == [[5, 2], [9, 0]]
    assert plan.logit_rows.tolist() == [6]
    assert plan.sampling is None


def test_a_token_on_its_way_is_named_by_its_row_in_the_step_before():
    chunk, one, other = (sequence_of(PROMPT[:length], 0) for length in (5, 3, 4))
    plan_step([Chunk(chunk, 0, 4, False), Chunk(one, 0, 3, True), Chunk(other, 0, 4, True)], BLOCK_SIZE)
    chunks = [Chunk(other, 4, 5, True), Chunk(one, 3, 4, True), Chunk(chunk, 4, 5, True)]
    plan = plan_step(chunks, BLOCK_SIZE)
    assert plan.ids.tolist() == [-2, -1, PROMPT[4]]
    assert plan.logit_rows.tolist() == [0, 1, 2]
    one.tokens.append(42)
    assert plan_step([Chunk(other, 5, 6, True), Chunk(one, 3, 4, True)], BLOCK_SIZE).ids.tolist() == [-1, 42]


def test_a_plan_says_how_each_row_is_sampled():
    params = [
        {},
        {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 3},
        {"temperature": 1e300, "top_k": 10**30},
    ]
    sequences = [sequence_of(PROMPT[:9], 0, **own) for own in params]
    for sequence in sequences:
        sequence.length += 1  # the scheduler has made room for the next token
    sampling = plan_step([Chunk(sequence, 0, 9, True) for sequence in sequences], BLOCK_SIZE).sampling
    assert sampling.temperature.tolist() == [0, 0.5, np.finfo(np.float32).max]
    assert sampling.top_k.tolist() == [0, 7, 2**31 - 1]
    assert sampling.top_p.tolist() == [1, 0.25, 1]
    assert sampling.logprobs is False
    by_position = np.random.Generator(np.random.Philox(key=np.array([3, 0], np.uint64), counter=9))
    assert sampling.uniform[1] == by_position.random()
    with_logprobs = sequence_of([1], 0, logprobs=True)
    assert plan_step([Chunk(with_logprobs, 0, 1, True)], BLOCK_SIZE).sampling.logprobs is True


def test_an_empty_plan_has_the_same_types():
    full = plan_step([Chunk(sequence_of([1, 2, 3], 0), 0, 3, True)], BLOCK_SIZE)
    empty = plan_step([], BLOCK_SIZE)
    for name, array in vars(full).items():
        if name != "sampling":
            assert getattr(empty, name).dtype == array.dtype == np.int32, name
            assert getattr(empty, name).ndim == array.ndim, name
            assert getattr(empty, name).size == 0, name
    assert full.logit_rows.tolist() == [2]
