"""Which tokens run when: first come first served, never more blocks, tokens or sequences than there is room for."""

import random

import numpy as np
import pytest

from mpi_tp.engine.kv_cache import BLOCK_SIZE, BlockPool, blocks_for
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.scheduler import MAX_STEP_TOKENS, Scheduler
from mpi_tp.engine.sequence import Chunk, Sequence
from mpi_tp.engine.step import plan_step


def waiting_sequence(prompt_length, max_length=None, key=None):
    prompt = [(7 * at + prompt_length) % 50 for at in range(prompt_length)]
    return Sequence(SamplingParams(), 0, prompt, prompt_length, max_length or prompt_length + 4, key)


def run_step(scheduler):
    """Do what the engine does in a step; a sequence is finished at its maximal length.

    Return the spans (start, stop, whether the next token is sampled) by key, and the finished sequences.
    """
    chunks = scheduler.schedule()
    spans = {chunk.sequence.key: (chunk.start, chunk.stop, chunk.ends_sequence) for chunk in chunks}
    for chunk in chunks:
        chunk.sequence.computed = chunk.stop
    for sequence in [chunk.sequence for chunk in chunks if spans[chunk.sequence.key][2]]:
        sequence.tokens.append(1)
        if len(sequence.tokens) == sequence.max_length:
            sequence.finish_reason = "length"
    return spans, scheduler.retire_finished()


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_ever_passed_and_everything_is_served_in_turn(seed):
    generator = random.Random(seed)
    num_blocks, max_batch_size = generator.randint(8, 40), generator.randint(1, 6)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, max_batch_size)
    sequences = []
    for key in range(30):
        length = generator.randint(1, 60)
        sequences.append(waiting_sequence(length, length + generator.randint(1, 60), key))
    queued = list(sequences)
    running, started, finished = {}, [], []
    while queued or not scheduler.is_idle:
        scheduler.add(queued.pop(0) for _ in range(min(len(queued), generator.randint(0, 4))))
        spans, retired = run_step(scheduler)
        started += sorted(key for key, (start, _, _) in spans.items() if start == 0)
        running |= {key: sequences[key] for key in spans}
        for sequence in retired:
            del running[sequence.key]
            finished.append(sequence.key)
        assert len(spans) <= max_batch_size
        held = [block for sequence in running.values() for block in sequence.blocks]
        assert len(set(held)) == len(held)
        assert len(held) + pool.num_free == num_blocks
        assert all(len(s.blocks) == blocks_for(s.max_length) for s in running.values())
    assert started == list(range(30))
    assert sorted(finished) == list(range(30))
    assert pool.num_free == num_blocks
    assert sorted(pool.take(num_blocks)) == list(range(num_blocks))


def test_nobody_overtakes_the_one_that_does_not_fit_yet():
    scheduler = Scheduler(BlockPool(4), max_batch_size=8)
    scheduler.add(
        [waiting_sequence(40, 48, "first"), waiting_sequence(30, 32, "large"), waiting_sequence(1, 2, "small")]
    )
    batches = []
    while not scheduler.is_idle:
        batches.append(set(run_step(scheduler)[0]))
    assert batches == [{"first"}] * 8 + [{"large", "small"}, {"large"}]


def test_what_can_never_fit_is_known_before():
    scheduler = Scheduler(BlockPool(2), max_batch_size=1)
    assert scheduler.fits(2 * BLOCK_SIZE)
    assert not scheduler.fits(2 * BLOCK_SIZE + 1)


def test_a_long_prompt_runs_in_chunks_beside_decoding():
    long = waiting_sequence(2 * MAX_STEP_TOKENS + 100, key="long")
    short = waiting_sequence(3, 30, key="short")
    scheduler = Scheduler(BlockPool(1000), max_batch_size=4)
    scheduler.add([short])
    run_step(scheduler)
    scheduler.add([long])
    spans = [run_step(scheduler)[0] for _ in range(4)]
    room = MAX_STEP_TOKENS - 1
    assert [step["short"] for step in spans] == [(at, at + 1, True) for at in range(3, 7)]
    assert [step["long"] for step in spans] == [
        (0, room, False),
        (room, 2 * room, False),
        (2 * room, 2 * room + 102, True),
        (2 * room + 102, 2 * room + 103, True),
    ]


def test_prompts_share_what_room_is_left():
    scheduler = Scheduler(BlockPool(1000), max_batch_size=4)
    scheduler.add(
        [waiting_sequence(MAX_STEP_TOKENS - 5, key=0), waiting_sequence(20, key=1), waiting_sequence(20, key=2)]
    )
    assert run_step(scheduler)[0] == {0: (0, MAX_STEP_TOKENS - 5, True), 1: (0, 5, False)}
    assert run_step(scheduler)[0] == {
        0: (MAX_STEP_TOKENS - 5, MAX_STEP_TOKENS - 4, True),
        1: (5, 20, True),
        2: (0, 20, True),
    }


def test_more_sequences_than_step_tokens_still_finish():
    count = MAX_STEP_TOKENS + 3
    scheduler = Scheduler(BlockPool(count), max_batch_size=count)
    scheduler.add([waiting_sequence(1, 3, key) for key in range(count)])
    finished = []
    while not scheduler.is_idle:
        spans, retired = run_step(scheduler)
        assert sum(stop - start for start, stop, _ in spans.values()) <= MAX_STEP_TOKENS
        finished += retired
    assert len(finished) == count


def test_a_plan_says_where_every_token_stands():
    first, second = waiting_sequence(20), waiting_sequence(3)
    first.blocks, second.blocks = [5, 2], [9]
    plan = plan_step([Chunk(first, 14, 18), Chunk(second, 0, 3)], BLOCK_SIZE)
    assert plan.ids.tolist() == first.tokens[14:18] + second.tokens
    assert plan.positions.tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert plan.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert plan.slots.tolist() == [5 * 16 + 14, 5 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16, 9 * 16 + 1, 9 * 16 + 2]
    assert plan.block_tables.tolist() == [[5, 2], [9, 0]]
    assert plan.logit_rows.tolist() == [6]


def test_an_empty_plan_has_the_same_types():
    full = plan_step([Chunk(waiting_with_block(), 0, 3)], BLOCK_SIZE)
    empty = plan_step([], BLOCK_SIZE)
    for name, array in vars(full).items():
        assert getattr(empty, name).dtype == array.dtype, name
        assert getattr(empty, name).ndim == array.ndim, name
        assert getattr(empty, name).size == 0, name
    assert np.asarray(full.logit_rows).tolist() == [2]


def waiting_with_block():
    sequence = waiting_sequence(3)
    sequence.blocks = [0]
    return sequence
