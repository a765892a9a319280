"""What every rank does in a batch job: open the files, load the model, serve the lines, say how it went."""

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from mpi_tp.batch import Batch, BatchFigures
from mpi_tp.config import ModelConfig
from mpi_tp.engine.engine import Engine, follow
from mpi_tp.errors import StoppedError
from mpi_tp.infer_options import STDIN, InferOptions
from mpi_tp.kernels import is_invariant
from mpi_tp.launch import Job
from mpi_tp.line_feed import LineFeed
from mpi_tp.mlp_batch import serve_rows
from mpi_tp.models.families import parse_config
from mpi_tp.records import (
    Earlier,
    Line,
    LineKeys,
    OrderedWriter,
    ResumableWriter,
    open_earlier,
    prompt_lines,
    read_lines,
    write_meta,
)
from mpi_tp.run_report import RunReport, gather_report, seconds_since_start
from mpi_tp.session import Session, open_engine, open_runner, open_session, open_shards
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
    shards = open_shards(job, options.shards)
    if options.share.count > 1 and job.rank == 0:
        print(f"mpi_tp: a task of a job array: serves {options.share}", file=sys.stderr)
    if isinstance(parse_config(shards.config), ModelConfig):
        _serve_text(job, shards, options)
    else:
        _tell(serve_rows(job, shards, options), options)
    return 0


def _serve_text(job: Job, shards: ShardSet, options: InferOptions) -> None:
    """Serve prompts, and say how it went."""
    lines, output, writer, figures = None, None, None, None
    with contextlib.ExitStack() as files:
        with job.phase("opening files"):  # before the long work, which a file that cannot be written would make vain
            if job.rank == 0:
                lines, output = _read_input(options), files.enter_context(_open_output(options, job))
        session = open_session(job, shards, options.machine)
        runner = open_runner(session)
        engine = open_engine(session, runner)
        start_seconds = seconds_since_start()
        with job.phase("generating"), job.stop.deferred():
            if engine and lines and output:
                writer = ResumableWriter(output, _line_keys(session)) if isinstance(output, Earlier) else output
                figures = _lead(Batch(engine, LineFeed(writer.pending(lines)), writer), engine, options, job)
            else:
                follow(session.comm, runner, lambda: _between_steps(job))
        with job.phase("writing the output"):
            if isinstance(writer, ResumableWriter):
                writer.finish(job.progress)
        _tell(gather_report(session, start_seconds, figures), options)


def _tell(report: RunReport | None, options: InferOptions) -> None:
    """Say how it went, on rank 0, which has the report."""
    if report:
        print(report.summary(), file=sys.stderr)
        if options.output and options.output.is_file():  # not beside a device or a pipe
            write_meta(options.output, report.facts(options))


def _open_output(options: InferOptions, job: Job) -> contextlib.AbstractContextManager[Earlier | OrderedWriter]:
    """Open an output file with its journal; standard output, a device or a pipe has none."""
    if options.output is None or (options.output.exists() and not options.output.is_file()):
        return OrderedWriter.open(options.output)
    return open_earlier(options.output, options.resume, job.progress)


def _line_keys(session: Session) -> LineKeys:
    """Return the keys of lines for this model, on this kind of device.

    Where any number of ranks gives the same bits, a record stays valid when the job goes on with another.
    """
    shards, invariant = session.shards, is_invariant(session.device, session.options.numerics)
    assert shards is not None, "lines are served from a set"
    basis = {
        "model": shards.model_id if invariant and shards.strategy == "column_wise" else shards.set_id,
        "tokenizer": [entry.digest for entry in shards.manifest.tokenizer],
        "device": session.device.type,
        "invariant": invariant,
    }
    return LineKeys(basis)


def _lead(batch: Batch, engine: Engine, options: InferOptions, job: Job) -> BatchFigures:
    """Run the batch under a progress bar, which shows on a terminal only, and release the other ranks."""
    with tqdm(unit=" lines", disable=None, desc="generating") as bar:

        def update(figures: BatchFigures) -> None:
            bar.update(figures.num_records - bar.n)
            _between_steps(job)

        try:
            batch.run(options.machine.max_batch_size, min(KEEP_ALIVE_SECONDS, options.stall_timeout / 4), update)
        except StoppedError as error:
            engine.close()
            raise StoppedError(f"{error}: {_how_to_go_on(batch.figures, options)}") from error
    engine.close()
    return batch.figures


def _between_steps(job: Job) -> None:
    job.progress()
    job.stop.check()


def _how_to_go_on(figures: BatchFigures, options: InferOptions) -> str:
    if options.output is None or not figures.num_records:
        return "run the same command again"
    again = "the same command" if options.resume else "the same command with --resume"
    return f"{figures.num_records} of the records are safe, {again} goes on"


def _read_input(options: InferOptions) -> Iterator[Line]:
    """Return the input lines of this task, the built-in prompts without an input."""
    chat, system, limit = options.chat, options.system, options.limit and min(options.limit, sys.maxsize)
    if options.input is None:
        lines = enumerate(prompt_lines(BUILT_IN_PROMPTS[:limit], options.sampling, chat=chat, system=system))
        return (line for index, line in lines if options.share.has(index))
    source = None if options.input == STDIN else options.input
    share = options.share
    return read_lines(source, options.sampling, chat=chat, system=system, limit=limit, wanted=share.has)
