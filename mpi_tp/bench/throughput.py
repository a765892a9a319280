"""A queue of requests, all submitted at once: output tokens a second, and how long each waits."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from mpi_tp.bench.chart import Chart
from mpi_tp.bench.chosen_model import ChosenModel
from mpi_tp.bench.report import Row
from mpi_tp.bench.requests import random_prompt, submit
from mpi_tp.bench.settings import ThroughputOptions
from mpi_tp.bench.timing import percentiles
from mpi_tp.engine.base import ServingEngine
from mpi_tp.errors import ConfigurationError
from mpi_tp.session import Machine, open_engine, open_runner

CHART = Chart("requests", ("tokens_per_s",))

WARM_UP_TOKENS = 32
"""Most that other prompts of the same lengths are answered with before the clock: what is compiled at first use, is."""


TOKEN_TIMES = ("first_token_p50_s", "first_token_p99_s", "between_tokens_p50_s", "between_tokens_p99_s")


@dataclass(frozen=True)
class Timeline:
    """When each step ended, in seconds since all requests were submitted, and what ended in it.

    `ends` has a pair for each request: the step that gave it its last token, and how many it has got.
    """

    step_ends: list[float]
    ends: list[tuple[int, int]]

    def token_times(self) -> list[list[float]]:
        """Return when each request got each of its tokens: one a step, since the first, unless one was preempted."""
        return [self.step_ends[last - count + 1 : last + 1] for last, count in self.ends]


def measure(machine: Machine, model: ChosenModel, settings: ThroughputOptions) -> list[Row]:
    """Return one row on rank 0, none on the others; collective. Raises ConfigurationError for too long requests."""
    longest = settings.input_len[1] + settings.output_len[1]
    if longest > model.config.max_position_embeddings:
        raise ConfigurationError(
            f"--input-len and --output-len take up to {longest} tokens and the model's context holds "
            f"{model.config.max_position_embeddings}: lower them"
        )
    session = model.load(machine)
    runner = open_runner(session)
    engine, follow = open_engine(session, runner)
    rows = []
    with machine.job.phase("generating"):
        if engine is None:
            follow(machine.job.progress)
        else:
            rows.append(_serve(engine, settings, model.config.vocab_size, machine))
            engine.close()
    return rows


def draw_lengths(settings: ThroughputOptions) -> list[tuple[int, int]]:
    """Return the tokens of each prompt and of its answer."""
    generator = random.Random(settings.seed)
    return [
        (generator.randint(*settings.input_len), generator.randint(*settings.output_len))
        for _ in range(settings.requests)
    ]


def _serve(engine: ServingEngine, settings: ThroughputOptions, vocab_size: int, machine: Machine) -> Row:
    generator = random.Random(settings.seed)
    lengths = draw_lengths(settings)
    warm_up = [
        (random_prompt(generator, length, vocab_size), min(answer, WARM_UP_TOKENS)) for length, answer in lengths
    ]
    num_warm_up = machine.replicas.count * machine.options.max_batch_size
    run_queue(engine, warm_up[:num_warm_up], machine.job.progress)
    queue = [(random_prompt(generator, length, vocab_size), answer) for length, answer in lengths]
    before = engine.num_preemptions
    row = summarise(run_queue(engine, queue, machine.job.progress))
    preemptions = engine.num_preemptions - before
    # A sequence that gave way skips steps, and when it got which token cannot be told from the outside; nor can it of
    # one that another replica ran.
    unknown = dict.fromkeys(TOKEN_TIMES) if preemptions or machine.replicas.count > 1 else {}
    return {"replicas": machine.replicas.count, **row, **unknown, "preemptions": preemptions}


def run_queue(engine: ServingEngine, queue: list[tuple[list[int], int]], on_step: Callable[[], None]) -> Timeline:
    """Submit all prompts, each with its number of new tokens, and run them to the end."""
    timeline = Timeline([], [])
    start = time.perf_counter()
    for key, (prompt, max_new_tokens) in enumerate(queue):
        submit(engine, key, prompt, max_new_tokens)
    while not engine.is_idle:
        outcomes = engine.step()
        timeline.step_ends.append(time.perf_counter() - start)
        for outcome in outcomes:
            if outcome.error:
                raise outcome.error
            timeline.ends.append((len(timeline.step_ends) - 1, len(outcome.completions[0].token_ids)))
        on_step()
    return timeline


def summarise(timeline: Timeline) -> Row:
    """Return the figures of a run."""
    times = timeline.token_times()
    first_p50, first_p99 = percentiles([tokens[0] for tokens in times])
    gaps = [after - before for tokens in times for before, after in pairwise(tokens)]
    gap_p50, gap_p99 = percentiles(gaps) if gaps else (None, None)
    num_tokens, seconds = sum(map(len, times)), timeline.step_ends[-1]
    return {
        "requests": len(times),
        "output_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "first_token_p50_s": first_p50,
        "first_token_p99_s": first_p99,
        "between_tokens_p50_s": gap_p50,
        "between_tokens_p99_s": gap_p99,
    }
