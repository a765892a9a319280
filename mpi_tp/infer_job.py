"""What every rank does in a batch job: open the files, load the model, serve the lines, say how it went."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

from mpi_tp.batch import Batch, BatchFigures
from mpi_tp.config import ModelConfig
from mpi_tp.infer_options import STDIN, InferOptions
from mpi_tp.launch import Job
from mpi_tp.line_feed import Line, LineFeed
from mpi_tp.mlp_batch import serve_rows
from mpi_tp.models.families import parse_config
from mpi_tp.records import OrderedWriter, prompt_lines, read_lines, write_meta
from mpi_tp.run_report import RunReport, gather_report, seconds_since_start
from mpi_tp.session import open_engine, open_runner, open_session, open_shards
from mpi_tp.shards.reader import ShardSet

KEEP_ALIVE_SECONDS = 1.0
"""How often the other ranks hear from rank 0 while it waits for input, at least."""
BUILT_IN_PROMPTS = (
    "The capital of France is",
    "A recipe for pancakes: first,",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
)


def infer(job: Job, options: InferOptions) -> int:
    """Serve the whole input and return the exit code; collective."""
    shards = open_shards(job, options.shards, options.machine.tensor_parallel)
    serve = _serve_text if isinstance(parse_config(shards.config), ModelConfig) else serve_rows
    report = serve(job, shards, options)
    if report:
        print(report.summary(), file=sys.stderr)
        if options.output and options.output.is_file():  # not beside a device or a pipe
            write_meta(options.output, report.facts(options))
    return 0


def _serve_text(job: Job, shards: ShardSet, options: InferOptions) -> RunReport | None:
    """Serve prompts; return rank 0's report."""
    figures = None
    with contextlib.ExitStack() as files:
        with job.phase("opening files"):
            ends = _open_ends(options, files) if job.rank == 0 else None
        session = open_session(job, shards, options.machine)
        runner = open_runner(session)
        engine, follow = open_engine(session, runner)
        start_seconds = seconds_since_start()
        with job.phase("generating"):
            if engine and ends:
                figures = _lead(Batch(engine, *ends), options, session.replicas.count, job.progress)
                engine.close()
            else:
                follow(job.progress)
        return gather_report(session, start_seconds, figures)


def _open_ends(options: InferOptions, files: contextlib.ExitStack) -> tuple[LineFeed, OrderedWriter]:
    """Open input and output before the long work, which an unwritable file would make vain."""
    return LineFeed(_read_input(options)), files.enter_context(OrderedWriter.open(options.output))


def _lead(batch: Batch, options: InferOptions, num_replicas: int, on_step: Callable[[], None]) -> BatchFigures:
    """Run the batch under a progress bar, which shows on a terminal only."""
    with tqdm(unit=" lines", disable=None, desc="generating") as bar:

        def update(figures: BatchFigures) -> None:
            on_step()
            bar.update(figures.num_records - bar.n)

        read_ahead = num_replicas * options.machine.max_batch_size
        batch.run(read_ahead, min(KEEP_ALIVE_SECONDS, options.stall_timeout / 4), update)
    return batch.figures


def _read_input(options: InferOptions) -> Iterator[Line]:
    """Return the input lines, the built-in prompts without an input."""
    if options.input is None:
        lines: Iterator[Line] = prompt_lines(
            BUILT_IN_PROMPTS, options.sampling, chat=options.chat, system=options.system
        )
    else:
        source = None if options.input == STDIN else options.input
        lines = read_lines(source, options.sampling, chat=options.chat, system=options.system)
    return itertools.islice(lines, options.limit and min(options.limit, sys.maxsize))
