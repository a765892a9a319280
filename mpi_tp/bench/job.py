"""What every rank does for a measurement: open the files, measure, write the results."""

import contextlib
from pathlib import Path
from typing import BinaryIO

import torch

from mpi_tp.atomic import open_output, write_errors
from mpi_tp.bench import comm, decode, linear, load, throughput
from mpi_tp.bench.chart import Chart, draw, load_pyplot
from mpi_tp.bench.chosen_model import ChosenModel
from mpi_tp.bench.report import Row, as_json, describe, heading, table
from mpi_tp.bench.settings import (
    BenchOptions,
    CommOptions,
    DecodeOptions,
    LinearOptions,
    LoadOptions,
    ThroughputOptions,
)
from mpi_tp.launch import Job
from mpi_tp.session import Machine, open_machine, open_shards


def bench(job: Job, options: BenchOptions) -> int:
    """Measure, print and write, and return the exit code; collective."""
    with contextlib.ExitStack() as files:
        with job.phase("opening files"):
            # Before the long work, which a missing library or an unwritable file would make vain.
            pyplot = load_pyplot() if options.plot else None
            json_file = _open(options.json, files) if options.json and job.rank == 0 else None
            plot_file = _open(options.plot, files) if options.plot and job.rank == 0 else None
        machine, chart, rows = _measure(job, options)
        meta = describe(options, machine)
        with job.phase("writing the results"):
            if job.rank == 0:
                print(heading(meta), table(rows), sep="\n\n", flush=True)
            if json_file:
                with write_errors(options.json):
                    json_file.write(as_json(meta, rows))
                    json_file.flush()
            if plot_file:
                draw(pyplot, chart, heading(meta), rows, plot_file)
    return 0


def _open(path: Path, files: contextlib.ExitStack) -> BinaryIO:
    return files.enter_context(open_output(path))


def _measure(job: Job, options: BenchOptions) -> tuple[Machine, Chart, list[Row]]:
    """Run the measurement; return its rows, on rank 0 at least, and how they are drawn."""
    match options.settings:
        case DecodeOptions() as settings:
            model = ChosenModel.open(job, settings.model)
            model.check_single("bench decode", job.size)
            machine = open_machine(job, options.machine, model.dtype)
            return machine, decode.CHART, decode.measure(machine, model, settings)
        case ThroughputOptions() as settings:
            model = ChosenModel.open(job, settings.model, options.machine.tensor_parallel)
            ranks = model.replica_ranks(job.size, options.machine.tensor_parallel)
            machine = open_machine(job, options.machine, model.dtype, ranks)
            return machine, throughput.CHART, throughput.measure(machine, model, settings)
        case LoadOptions() as settings:
            shards = open_shards(job, settings.shards)
            machine = open_machine(job, options.machine, shards.weights_dtype, shards.ranks)
            return machine, load.CHART, load.measure(machine, shards, settings.rounds)
        case CommOptions() as settings:
            return _measure_comm(job, options, settings)
        case LinearOptions() as settings:
            machine = open_machine(job, options.machine, torch.float32)
            return machine, linear.CHART, linear.measure(machine, settings)


def _measure_comm(job: Job, options: BenchOptions, settings: CommOptions) -> tuple[Machine, Chart, list[Row]]:
    dtype: torch.dtype = getattr(torch, settings.dtype)
    model = ChosenModel.open(job, settings.model) if settings.model else None
    if model:
        model.check_single("bench comm", job.size)
    with comm.nccl_log(job.rank) as log:
        machine = open_machine(job, options.machine, dtype)
        messages = comm.generic_messages(machine.device, dtype)
        if model:
            messages += comm.model_messages(model.config, model.strategy)
        return machine, comm.CHART, comm.measure(machine, messages, dtype, log)
