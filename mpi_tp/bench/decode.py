"""Decoding at fixed batch sizes: what a step takes, and what that is against this machine's memory."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from mpi_tp.bench.chart import Chart
from mpi_tp.bench.chosen_model import ChosenModel
from mpi_tp.bench.decode_case import PROFILED_STEPS, DecodeCase
from mpi_tp.bench.report import Row
from mpi_tp.bench.requests import random_prompt, submit
from mpi_tp.bench.settings import WARM_UP_STEPS, DecodeOptions
from mpi_tp.bench.timed_comm import TimedMpiCommunicator, nccl_share
from mpi_tp.bench.timing import copy_bytes_per_second
from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.comm.nccl import NcclCommunicator
from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.scheduler import STEP_TOKENS
from mpi_tp.session import Machine, Session, open_engine, open_runner

CHART = Chart("batch_size", ("tokens_per_s",), logarithmic=True)


@dataclass(frozen=True)
class DecodeFigures:
    """Seconds of each step that counts, and the share of collectives in them, None if it is not known."""

    step_seconds: list[float]
    comm_share: float | None


def measure(machine: Machine, model: ChosenModel, settings: DecodeOptions) -> list[Row]:
    """Return a row a batch size on rank 0, none on the others; collective.

    Raises ConfigurationError if the sequences do not fit into the model's context or the cache.
    """
    with machine.job.phase("planning the steps"):
        room = STEP_TOKENS[machine.device.type]
        cases = [DecodeCase.plan(size, settings.context, settings.steps, room) for size in settings.batch_sizes]
        for case in cases:
            case.check_context(model.config.max_position_embeddings)
    with machine.job.phase("measuring copies"):
        copies = machine.comm.all_gather_object(copy_bytes_per_second(machine))
    if isinstance(machine.comm, MpiCommunicator):
        machine = dataclasses.replace(machine, comm=TimedMpiCommunicator(machine.job.world.Dup()))
    session = model.load(machine)
    runner = open_runner(session)
    engine, follow = open_engine(session, runner)
    weight_bytes = mean_weight_bytes(model, machine.comm.size)
    rows = []
    with machine.job.phase("decoding"):
        for case in cases:
            case.check_cache(runner.num_blocks)
        if engine is None:
            follow(machine.job.progress)
        else:
            for case in cases:
                for seed in range(2):  # what is compiled or captured at first use, is before the clock
                    figures = _decode(engine, session, case, model.config.vocab_size, seed)
                rows.append(_row(case, settings.context, figures, weight_bytes, statistics.mean(copies)))
            engine.close()
    return rows


def mean_weight_bytes(model: ChosenModel, ranks: int) -> float:
    """Return the bytes of weights that a step reads, on average over the ranks.

    Of an embedding that is not `lm_head` too, a step reads but a few rows.
    """
    plan = dict(model.plan(ranks))
    if not model.config.tie_word_embeddings:
        del plan["model.embed_tokens.weight"]
    shapes = [torch.Size(planned.local_shape(rank)) for planned in plan.values() for rank in range(ranks)]
    return sum(shape.numel() for shape in shapes) * model.dtype.itemsize / ranks


def _decode(engine: ServingEngine, session: Session, case: DecodeCase, vocab_size: int, seed: int) -> DecodeFigures:
    """Run one batch size from its prompts to its end, on rank 0."""
    generator = random.Random(seed)

    def step() -> None:
        for outcome in engine.step():
            if outcome.error:
                raise outcome.error
        session.job.progress()

    for key in range(case.batch_size):
        submit(engine, key, random_prompt(generator, case.prompt_length, vocab_size), case.max_new_tokens)
    for _ in range(case.prompt_steps + WARM_UP_STEPS):
        step()
    figures = _clock(step, session.comm, case.steps)
    while not engine.is_idle:
        step()
    return figures


def _clock(step: Callable[[], None], comm: Communicator, num_steps: int) -> DecodeFigures:
    comm_start = comm.seconds if isinstance(comm, TimedMpiCommunicator) else 0.0
    times = [time.perf_counter()]
    for _ in range(num_steps):
        step()
        times.append(time.perf_counter())
    step_seconds = [end - start for start, end in pairwise(times)]
    comm_share: float | None = 0.0
    if isinstance(comm, TimedMpiCommunicator):
        comm_share = (comm.seconds - comm_start) / sum(step_seconds)
    elif isinstance(comm, NcclCommunicator):
        comm_share = _profiled_share(step)
    return DecodeFigures(step_seconds, comm_share)


def _profiled_share(step: Callable[[], None]) -> float | None:
    """Return NCCL's share of the device's time in some more steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    return nccl_share({event.key: event.self_device_time_total for event in profiler.key_averages()})


def _row(case: DecodeCase, context: int, figures: DecodeFigures, weight_bytes: float, copy_rate: float) -> Row:
    seconds = statistics.mean(figures.step_seconds)
    return {
        "batch_size": case.batch_size,
        "context": context,
        "ms_per_step": seconds * 1e3,
        "median_ms": statistics.median(figures.step_seconds) * 1e3,
        "tokens_per_s": case.batch_size / seconds,
        "weight_gb_s": weight_bytes / seconds / 1e9,
        "copy_share": weight_bytes / seconds / copy_rate,
        "comm_share": figures.comm_share,
    }
