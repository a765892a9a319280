"""Rows in, rows out: the job of `mpi_tp.infer` for a shard set that holds a plain stack of linear layers."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from mpi_tp.config import MLPConfig
from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.infer_options import InferOptions
from mpi_tp.launch import Job
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.records.atomic import replacing, write_errors
from mpi_tp.session import MachineOptions, open_session
from mpi_tp.shards.reader import ShardSet

RANDOM_ROWS = 8
"""Size of the batch that is made up when no input is given."""


def read_rows(source: Path | None, num_features: int, seed: int) -> NDArray[np.float32]:
    """Return the batch [rows, num_features] of a `.npy` or `.h5[:dataset]` file; random normal rows without one.

    Raises FileError for a file that cannot be read, ConfigurationError for rows that the model does not take.
    """
    if source is None:
        return np.random.default_rng(seed).standard_normal((RANDOM_ROWS, num_features), np.float32)
    rows = _read_hdf5(str(source)) if ".h5" in source.name else _read_npy(source)
    if rows.ndim != 2 or rows.shape[1] != num_features:
        raise ConfigurationError(f"{source} has shape {list(rows.shape)}: the model takes rows of {num_features}")
    if not np.issubdtype(rows.dtype, np.number) or np.iscomplexobj(rows):
        raise ConfigurationError(f"{source} holds {rows.dtype}: the model takes real numbers")
    return rows.astype(np.float32)


def check_output(output: Path | None) -> None:
    """Raise UsageError unless the output is one that `write_rows` knows."""
    if output and output.suffix not in (".npy", ".h5"):
        raise UsageError(f"--output {output}: a model of linear layers writes .npy or .h5 files")


def serve_rows(job: Job, shards: ShardSet, config: MLPConfig, options: InferOptions, machine: MachineOptions) -> None:
    """Run all rows of the input through the stack and write the outputs; collective."""
    with job.phase("reading the input"):
        check_output(options.output)
        source = options.input if isinstance(options.input, Path) else None
        rows = read_rows(source, config.layer_sizes[0], options.sampling.seed)[: options.limit]
    session = open_session(job, shards, machine)
    assert isinstance(session.model, MLPStack)
    dtype = session.kernels.activation_dtype or session.dtype
    outputs = []
    with job.phase("computing"), torch.inference_mode():
        for batch in torch.from_numpy(rows).split(machine.max_batch_size):
            outputs.append(session.model(batch.to(session.device, dtype)).float().cpu())
            job.progress()
    with job.phase("writing the output"):
        if job.rank == 0:
            write_rows(options.output, torch.cat(outputs).numpy())


def write_rows(output: Path | None, rows: NDArray[np.float32]) -> None:
    """Write rows to a `.npy` file, to dataset `y` of an `.h5` file, or as one JSON record a row to standard output."""
    if output is None:
        for index, row in enumerate(rows, 1):
            sys.stdout.write(json.dumps({"id": index, "output": row.tolist()}) + "\n")
        return
    with replacing(output) as stream, write_errors(output):
        if output.suffix == ".npy":
            np.save(stream, rows)
        else:
            with h5py.File(stream, "w") as file:
                file["y"] = rows


def _read_npy(path: Path) -> NDArray[np.generic]:
    try:
        rows: NDArray[np.generic] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    return rows


def _read_hdf5(source: str) -> NDArray[np.generic]:
    path, _, name = source.partition(".h5:")
    path = path if path.endswith(".h5") else path + ".h5"
    try:
        with h5py.File(path, "r", locking=False) as file:
            names = [name] if name else [key for key, item in file.items() if isinstance(item, h5py.Dataset)]
            if len(names) != 1:
                raise ConfigurationError(f"{path} holds the datasets {', '.join(names)}: name one as {path}:DATASET")
            rows: NDArray[np.generic] = file[names[0]][...]
    except (OSError, KeyError) as error:
        raise FileError(f"cannot read {source}: {error}") from error
    return rows
