"""Which tokens run when: first come first served, never more blocks, tokens or sequences than there is room for."""

import itertools
import random

import pytest

from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.kv_cache import BLOCK_SIZE, blocks_for
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.scheduler import STEP_TOKENS, Scheduler
from mpi_tp.engine.sequence import Sequence

PROMPT = list(range(100, 200))


def waiting_sequence(prompt, max_length=None, key=None, **params):
    """Return a sequence with this prompt; a number is the length of one that begins like no other's."""
    if isinstance(prompt, int):
        prompt = [1000 + prompt] * prompt
    return Sequence(SamplingParams(**params), 0, list(prompt), len(prompt), max_length or len(prompt) + 4, key)


class Steps:
    """Does what the engine does in a step, and tells the tokens of a step when `delay` more have been scheduled."""

    def __init__(self, scheduler, delay=0):
        self.scheduler = scheduler
        self._delay = delay
        self._in_flight = []

    def run(self):
        """Return the spans (start, stop, whether the next token is sampled) by key, and the finished sequences."""
        chunks = self.scheduler.schedule()
        if chunks:
            self._in_flight.append([chunk.sequence for chunk in chunks if chunk.ends_sequence])
        spans = {chunk.sequence.key: (chunk.start, chunk.stop, chunk.ends_sequence) for chunk in chunks}
        assert len(spans) == len(chunks)
        finished = []
        while len(self._in_flight) > (self._delay if chunks else 0):
            for sequence in self._in_flight.pop(0):
                sequence.tokens.append(1)
                if len(sequence.tokens) == sequence.max_length:
                    sequence.finish_reason, sequence.is_finished = "length", True
                    finished.append(sequence)
        self.scheduler.remove(finished)
        return spans, finished

    def run_all(self):
        """Return the spans of every step until nothing is left."""
        steps = []
        while not self.scheduler.is_idle:
            steps.append(self.run()[0])
        return steps


def holders(sequences):
    """Return which sequences hold each block."""
    by_block = {}
    for sequence in sequences:
        for block in sequence.blocks.tolist():
            by_block.setdefault(block, []).append(sequence)
    return by_block


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_ever_passed_and_everything_is_served(seed, delay):
    generator = random.Random(seed)
    num_blocks, max_batch_size, max_step_tokens = (generator.randint(*span) for span in ((8, 30), (1, 8), (5, 100)))
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, max_batch_size, max_step_tokens)
    steps = Steps(scheduler, delay)
    sequences = []
    for key in range(40):
        beginning = [generator.randrange(3)] * generator.randint(0, 40)
        prompt = beginning + [generator.randrange(50) for _ in range(generator.randint(1, 20))]
        sequences.append(waiting_sequence(prompt, len(prompt) + generator.randint(1, 60), key))
    queued = list(sequences)
    first_seen, finished = [], []
    while queued or not scheduler.is_idle:
        scheduler.add(queued.pop(0) for _ in range(min(len(queued), generator.randint(0, 4))))
        spans, done = steps.run()
        first_seen += [key for key in spans if key not in first_seen]
        finished += [sequence.key for sequence in done]
        assert len(spans) <= max_batch_size
        assert scheduler.num_running <= max_batch_size
        assert sum(stop - start for start, stop, _ in spans.values()) <= max_step_tokens
        by_block = holders(sequences)
        assert len(by_block) == scheduler.blocks_in_use == num_blocks - pool.num_free
        assert all(len(set(owners)) == len(owners) for owners in by_block.values())
        for block, owners in by_block.items():
            contents = {tuple(own.tokens[: (own.blocks.tolist().index(block) + 1) * BLOCK_SIZE]) for own in owners}
            assert len(contents) == 1
        for sequence in sequences:
            assert sequence.computed <= len(sequence.blocks) * BLOCK_SIZE
            assert len(sequence.blocks) <= blocks_for(sequence.max_length)
    assert first_seen == list(range(40))
    assert sorted(finished) == list(range(40))
    assert [len(sequence.tokens) for sequence in sequences] == [sequence.max_length for sequence in sequences]
    assert pool.num_free == num_blocks


@pytest.mark.parametrize("delay", [0, 1])
def test_a_sequence_takes_a_block_when_the_last_one_is_full(delay):
    scheduler = Scheduler(BlockPool(10), 2)
    sequence = waiting_sequence(BLOCK_SIZE - 2, 3 * BLOCK_SIZE, "one")
    scheduler.add([sequence])
    steps = Steps(scheduler, delay)
    used = []
    while not scheduler.is_idle:
        spans, _ = steps.run()
        used += [(spans["one"][1], scheduler.blocks_in_use)] if len(sequence.blocks) else []
    assert used
    assert all(blocks == blocks_for(stop) for stop, blocks in used)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_last_admitted_makes_room_and_comes_back_first(delay):
    """Three of two blocks each that grow to four in a cache of nine, and one that waits."""
    scheduler = Scheduler(BlockPool(9), max_batch_size=4)
    keys = ["first", "second", "third", "late"]
    scheduler.add([waiting_sequence(17 + at, 64, key) for at, key in enumerate(keys)])
    steps = Steps(scheduler, delay).run_all()
    runs = {key: [at for at, step in enumerate(steps) if key in step] for key in keys}
    assert scheduler.num_preemptions == 1
    for key in ("first", "second"):
        assert runs[key] == list(range(len(runs[key])))
    [resumed] = [at for before, at in itertools.pairwise(runs["third"]) if at > before + 1]
    assert resumed > runs["second"][-1]
    assert runs["late"][0] >= resumed


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("old_length", "kept"), [(64, 0), (40, 16), (32, 32)])
def test_what_a_resumed_sequence_has_lost_is_computed_again(old_length, kept, delay):
    """The young one is driven out with two full blocks; the old one takes none, one or both of them."""
    scheduler = Scheduler(BlockPool(4), max_batch_size=2)
    old, young = waiting_sequence(10, old_length, "old"), waiting_sequence(20, 40, "young")
    scheduler.add([old, young])
    spans = [step["young"] for step in Steps(scheduler, delay).run_all() if "young" in step]
    assert scheduler.num_preemptions == 1
    assert spans == [
        (0, 20, True),
        *[(at, at + 1, True) for at in range(20, 32)],
        (kept, 33, True),
        *[(at, at + 1, True) for at in range(33, 39)],
    ]
    assert scheduler.prefix_hit_tokens == kept
    assert (len(old.tokens), len(young.tokens)) == (old_length, 40)


def test_a_sequence_driven_out_with_a_token_on_its_way_waits_for_it():
    scheduler = Scheduler(BlockPool(10), max_batch_size=2)
    sequence = waiting_sequence(20)
    sequence.length += 1
    scheduler.add([sequence, waiting_sequence(3)])
    assert scheduler.schedule() == []
    sequence.tokens.append(1)
    assert [(chunk.start, chunk.stop) for chunk in scheduler.schedule()] == [(0, 21), (0, 3)]


def test_nobody_overtakes_the_one_that_does_not_fit_yet():
    scheduler = Scheduler(BlockPool(5), max_batch_size=8)
    scheduler.add(
        [waiting_sequence(40, 44, "first"), waiting_sequence(31, 34, "large"), waiting_sequence(1, 2, "small")]
    )
    batches = [set(step) for step in Steps(scheduler).run_all()]
    assert batches == [{"first"}] * 4 + [{"large", "small"}, {"large"}, {"large"}]


def test_what_can_never_fit_is_known_before():
    scheduler = Scheduler(BlockPool(2), max_batch_size=1)
    assert scheduler.fits(2 * BLOCK_SIZE)
    assert not scheduler.fits(2 * BLOCK_SIZE + 1)


def test_a_long_prompt_runs_in_chunks_beside_decoding():
    scheduler = Scheduler(BlockPool(1000), max_batch_size=4)
    steps = Steps(scheduler)
    scheduler.add([waiting_sequence(3, 30, "short")])
    steps.run()
    scheduler.add([waiting_sequence(2 * STEP_TOKENS["cpu"] + 100, key="long")])
    spans = [steps.run()[0] for _ in range(4)]
    room = STEP_TOKENS["cpu"] - 1
    assert [step["short"] for step in spans] == [(at, at + 1, True) for at in range(3, 7)]
    assert [step["long"] for step in spans] == [
        (0, room, False),
        (room, 2 * room, False),
        (2 * room, 2 * room + 102, True),
        (2 * room + 102, 2 * room + 103, True),
    ]


def test_prompts_share_what_room_is_left():
    scheduler = Scheduler(BlockPool(1000), max_batch_size=4, max_step_tokens=100)
    steps = Steps(scheduler)
    scheduler.add([waiting_sequence(95, key=0), waiting_sequence(20, key=1), waiting_sequence(21, key=2)])
    assert steps.run()[0] == {0: (0, 95, True), 1: (0, 5, False)}
    assert steps.run()[0] == {0: (95, 96, True), 1: (5, 20, True), 2: (0, 21, True)}


def test_more_sequences_than_step_tokens_still_finish():
    scheduler = Scheduler(BlockPool(20), max_batch_size=20, max_step_tokens=7)
    scheduler.add([waiting_sequence(1, 3, key) for key in range(20)])
    steps = Steps(scheduler).run_all()
    assert max(map(len, steps)) == 7
    assert sum(map(len, steps)) == 40


@pytest.mark.parametrize("delay", [0, 1])
def test_samples_of_one_prompt_compute_it_once(delay):
    """Even in one step: the first one's chunk writes the keys and values before the others attend to them."""
    scheduler = Scheduler(BlockPool(100), max_batch_size=8)
    samples = [waiting_sequence(PROMPT, key=key) for key in range(4)]
    scheduler.add(samples)
    assert Steps(scheduler, delay).run()[0] == {0: (0, 100, True)} | dict.fromkeys((1, 2, 3), (96, 100, True))
    assert scheduler.prefix_hit_tokens == 3 * 96
    assert scheduler.blocks_in_use == 6 + 4
    assert len({tuple(sample.blocks[:6]) for sample in samples}) == 1
    assert len({sample.blocks[6] for sample in samples}) == 4


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 96)])
def test_the_last_token_is_always_computed(length, hit):
    scheduler = Scheduler(BlockPool(100), max_batch_size=1)
    steps = Steps(scheduler)
    scheduler.add([waiting_sequence(PROMPT, key="whole"), waiting_sequence(PROMPT[:length], key="part")])
    assert next(step["part"] for step in steps.run_all() if "part" in step) == (hit, length, True)


def test_only_what_a_chunk_computes_can_be_shared_after_it():
    scheduler = Scheduler(BlockPool(100), max_batch_size=2, max_step_tokens=50)
    steps = Steps(scheduler)
    scheduler.add([waiting_sequence(PROMPT, key=0), waiting_sequence([*PROMPT[:90], 1, 2, 3], key=1)])
    assert steps.run()[0] == {0: (0, 50, False)}
    assert steps.run()[0] == {0: (50, 100, True)}
    assert steps.run()[0] == {0: (100, 101, True), 1: (80, 93, True)}


@pytest.mark.parametrize("delay", [0, 1])
def test_an_answer_is_found_by_the_prompt_that_goes_on_from_it(delay):
    scheduler = Scheduler(BlockPool(100), max_batch_size=1)
    steps = Steps(scheduler, delay)
    first = waiting_sequence(PROMPT[:20], 49, "first")
    scheduler.add([first])
    steps.run_all()
    scheduler.add([waiting_sequence([*first.tokens, 7, 8], key="second")])
    assert steps.run()[0] == {"second": (48, 51, True)}


def test_the_longest_unused_content_is_given_up_first():
    scheduler = Scheduler(BlockPool(6), max_batch_size=1)
    steps = Steps(scheduler)
    for prompt in ([1] * 33, [2] * 33, [1] * 33):
        scheduler.add([waiting_sequence(prompt, 34)])
        steps.run_all()
    assert scheduler.prefix_hit_tokens == 32
    scheduler.add([waiting_sequence([3] * 33, 34)])
    steps.run_all()
    scheduler.add([waiting_sequence([1] * 33, 34)])
    steps.run_all()
    assert scheduler.prefix_hit_tokens == 64


def test_removed_sequences_leave_nothing_behind():
    scheduler = Scheduler(BlockPool(10), max_batch_size=2)
    sequences = [waiting_sequence(20 + key, key=key) for key in range(4)]
    scheduler.add(sequences)
    steps = Steps(scheduler)
    steps.run()
    scheduler.remove([sequences[0], sequences[2]])
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.blocks_in_use) == (1, 1, 2)
    assert set(steps.run()[0]) == {1, 3}
    scheduler.remove(sequences[1::2])
    assert scheduler.is_idle
    assert scheduler.blocks_in_use == 0
