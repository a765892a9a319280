"""What every rank does in a batch job: open the files, load the model, serve the lines, say how it went."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from mpi_tp.batch import Batch, BatchFigures
from mpi_tp.config import ModelConfig
from mpi_tp.engine.engine import follow
from mpi_tp.infer_options import STDIN, InferOptions
from mpi_tp.launch import Job
from mpi_tp.line_feed import Line, LineFeed
from mpi_tp.mlp_batch import serve_rows
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config
from mpi_tp.records import OrderedWriter, prompt_lines, read_lines, write_meta
from mpi_tp.run_report import RunReport, gather_report
from mpi_tp.session import MachineOptions, open_engine, open_runner, open_session, open_shards
from mpi_tp.shards.reader import ShardSet

BUILT_IN_PROMPTS = (
    "The capital of France is",
    "A recipe for pancakes: first,",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
)


def infer(job: Job, options: InferOptions) -> int:
    """Serve the whole input and return the exit code; collective."""
    shards = open_shards(job, options.shards)
    config = parse_config(shards.config)
    if not isinstance(config, ModelConfig):
        serve_rows(job, shards, config, options, machine_options(options))
        return 0
    report = _serve_text(job, shards, config, options)
    if report:
        print(report.summary(), file=sys.stderr)
        if options.output:
            write_meta(options.output, report.facts(options))
    return 0


def machine_options(options: InferOptions) -> MachineOptions:
    """Return the part of the options that says where and how the model runs."""
    return MachineOptions(
        device=options.device,
        comm=options.comm,
        share_gpu=options.share_gpu,
        numerics=options.numerics,
        max_batch_size=options.max_batch_size,
        kv_memory=options.kv_memory,
    )


def _serve_text(job: Job, shards: ShardSet, config: ModelConfig, options: InferOptions) -> RunReport | None:
    started = time.perf_counter()
    with contextlib.ExitStack() as files:
        with job.phase("opening files"):
            if job.rank == 0:
                feed = LineFeed(_read_input(options))
                writer = files.enter_context(OrderedWriter.open(options.output))
        session = open_session(job, shards, machine_options(options))
        assert isinstance(session.model, CausalLM)
        runner, num_blocks = open_runner(session, config, session.model)
        with job.phase("loading the tokenizer"):
            engine = open_engine(session, config, runner, num_blocks) if job.rank == 0 else None
        start_seconds = time.perf_counter() - started
        with job.phase("generating"):
            if engine:
                batch = Batch(engine, feed, writer)
                _run(batch, options.max_batch_size, job.progress)
                engine.close()
            else:
                follow(session.comm, runner, job.progress)
        return gather_report(session, start_seconds, batch.figures if engine else None)


def _run(batch: Batch, read_ahead: int, on_step: Callable[[], None]) -> None:
    """Run the batch under a progress bar, which shows on a terminal only."""
    with tqdm(unit=" lines", disable=None, desc="generating") as bar:

        def update(figures: BatchFigures) -> None:
            on_step()
            bar.update(figures.num_records - bar.n)

        batch.run(read_ahead, update)


def _read_input(options: InferOptions) -> Iterator[Line]:
    """Return the input lines, the built-in prompts without an input."""
    if options.input is None:
        lines: Iterator[Line] = prompt_lines(
            BUILT_IN_PROMPTS, options.sampling, chat=options.chat, system=options.system
        )
    else:
        source = None if options.input == STDIN else options.input
        lines = read_lines(source, options.sampling, chat=options.chat, system=options.system)
    return itertools.islice(lines, options.limit)
