"""Rows in, rows out: the job of `mpi_tp.infer` for a shard set that holds a plain stack of linear layers."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from mpi_tp.atomic import replacing, write_errors
from mpi_tp.config import MLPConfig
from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.infer_options import STDIN, InferOptions
from mpi_tp.launch import Job
from mpi_tp.models.families import parse_config
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.records import OrderedWriter
from mpi_tp.run_report import RunReport, gather_report, seconds_since_start
from mpi_tp.session import Session, open_session
from mpi_tp.shards.reader import ShardSet

RANDOM_ROWS = 8
"""Size of the batch that is made up when no input is given."""
OUTPUT_DATASET = "y"

Rows = NDArray[np.float32]
"""[rows, features]"""

_HDF5_SOURCE = re.compile(r"(?P<path>.+?\.h5)(?::(?P<dataset>.+))?")


@dataclass(frozen=True)
class RowFigures:
    """What was computed; `seconds` without reading and writing."""

    num_rows: int
    seconds: float

    def summary(self, start_seconds: float) -> str:
        """Return the figures for people; `start_seconds` passed before the first row."""
        return f"{self.num_rows} rows, {self.num_rows / self.seconds:.1f} rows/s after {start_seconds:.2f} s"


def serve_rows(job: Job, shards: ShardSet, options: InferOptions) -> RunReport | None:
    """Run all rows of the input through the stack and write the outputs; collective; returns rank 0's report."""
    config = parse_config(shards.config)
    assert isinstance(config, MLPConfig), f"no stack of linear layers: {config.model_type}"
    if options.resume and job.rank == 0:
        print("mpi_tp: --resume: rows have no journal, all of them are computed", file=sys.stderr)
    with contextlib.ExitStack() as files:
        with job.phase("opening files"):
            rows = read_rows(options.input, config.layer_sizes[0], options.sampling.seed)[: options.limit]
            rows = rows[options.share.index :: options.share.count]
            write = files.enter_context(open_rows_output(options.output)) if job.rank == 0 else None
        session = open_session(job, shards, options.machine)
        start_seconds = seconds_since_start()
        with job.phase("computing"):
            outputs, figures = _compute(session, rows)
        with job.phase("writing the output"):
            if write:
                write(outputs)
        return gather_report(session, start_seconds, figures if job.rank == 0 else None)


def read_rows(source: Path | str | None, num_features: int, seed: int) -> Rows:
    """Return the batch [rows, num_features] of a `.npy` or `.h5[:dataset]` file; random normal rows without one.

    Raises UsageError for standard input, FileError for a file that cannot be read, ConfigurationError for rows that the
    model does not take.
    """
    if source is None:
        return np.random.default_rng(seed).standard_normal((RANDOM_ROWS, num_features), np.float32)
    if source == STDIN:
        raise UsageError("--input -: a model of linear layers reads .npy or .h5 files")
    in_hdf5 = _HDF5_SOURCE.fullmatch(str(source))
    rows = _read_hdf5(in_hdf5["path"], in_hdf5["dataset"]) if in_hdf5 else _read_npy(Path(source))
    if rows.ndim != 2 or rows.shape[1] != num_features:
        raise ConfigurationError(f"{source} has shape {list(rows.shape)}: the model takes rows of {num_features}")
    if not np.issubdtype(rows.dtype, np.number) or np.iscomplexobj(rows):
        raise ConfigurationError(f"{source} holds {rows.dtype}: the model takes real numbers")
    return rows.astype(np.float32)


@contextlib.contextmanager
def open_rows_output(output: Path | None) -> Iterator[Callable[[Rows], None]]:
    """Open a `.npy` file, an `.h5` file (dataset `y`), or standard output (a JSON record a row); yield its writer.

    Raises UsageError for other files, FileError if it cannot be opened, written or, when the block ends, completed.
    """
    if output is None:
        with OrderedWriter.open(None) as writer:
            yield partial(_write_records, writer)
    elif output.suffix not in (".npy", ".h5"):
        raise UsageError(f"--output {output}: a model of linear layers writes .npy or .h5 files")
    else:
        with replacing(output) as stream:
            yield partial(_write_npy if output.suffix == ".npy" else _write_hdf5, output, stream)


@torch.inference_mode()
def _compute(session: Session, rows: Rows) -> tuple[Rows, RowFigures]:
    assert isinstance(session.model, MLPStack)
    outputs = []
    start = time.perf_counter()
    for batch in torch.from_numpy(rows).split(session.options.max_batch_size):
        outputs.append(session.model(batch.to(session.device, session.dtype)).float().cpu())
        session.job.progress()
    return torch.cat(outputs).numpy(), RowFigures(len(rows), time.perf_counter() - start)


def _write_records(writer: OrderedWriter, rows: Rows) -> None:
    for index, row in enumerate(rows):
        writer.write(index, {"id": index + 1, "output": row.tolist()})


def _write_npy(output: Path, stream: BinaryIO, rows: Rows) -> None:
    with write_errors(output):
        np.save(stream, rows)


def _write_hdf5(output: Path, stream: BinaryIO, rows: Rows) -> None:
    with write_errors(output), h5py.File(stream, "w") as file:
        file[OUTPUT_DATASET] = rows


def _read_npy(path: Path) -> NDArray[np.generic]:
    try:
        with path.open("rb") as file:
            rows: NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    return rows


def _read_hdf5(path: str, name: str | None) -> NDArray[np.generic]:
    try:
        with h5py.File(path, "r", locking=False) as file:
            names = [name] if name else [key for key, item in file.items() if isinstance(item, h5py.Dataset)]
            if len(names) != 1:
                raise ConfigurationError(f"{path} holds the datasets {', '.join(names)}: name one as {path}:DATASET")
            rows: NDArray[np.generic] = file[names[0]][...]
    except (OSError, KeyError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    return rows
