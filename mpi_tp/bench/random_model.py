"""Models with random weights, made by each rank on its device, with no file."""

import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpi_tp.bench.shapes import Shape
from mpi_tp.comm.base import Communicator
from mpi_tp.config import ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.layers.context import LayerContext
from mpi_tp.loading import LoadFigures
from mpi_tp.memory import fitting
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.partition.plan import PlannedTensor, Strategy, plan_shards
from mpi_tp.session import Machine, Session, start_session

DEVIATION = 0.02
"""Standard deviation of the weights, as models are initialised for training."""


def open_random_session(machine: Machine, shape: Shape, strategy: Strategy, dtype: torch.dtype) -> Session:
    """Make this rank's part of a language model with random weights; collective.

    Raises ConfigurationError for a config that is not supported, too many ranks and too little memory.
    """
    start = time.perf_counter()
    num_bytes = 0

    def count(tensor: torch.Tensor) -> None:
        nonlocal num_bytes
        num_bytes += tensor.nbytes
        machine.job.progress()

    with machine.job.phase("making random weights"):
        config = parse_config(shape.config)
        assert isinstance(config, ModelConfig), f"no language model: {config.model_type}"
        check_ranks(shape.name, config.max_ranks, machine.comm.size)
        context = random_context(machine, machine.comm, shape.config, strategy, dtype, count)
        with fitting(f"rank {machine.comm.rank}'s part of {shape.name} on its {machine.device.type}", "use more ranks"):
            model = CausalLM(context, config)
    figures = LoadFigures(num_bytes, time.perf_counter() - start)
    return start_session(machine, None, config, dtype, model, figures)


def check_ranks(name: str, most: int, size: int) -> None:
    """Raise ConfigurationError if there are more ranks than a model can be split over."""
    if size > most:
        raise ConfigurationError(f"{name} can be split over {most} ranks but mpirun started {size}: use -np {most}")


def random_context(
    machine: Machine,
    comm: Communicator,
    config: Mapping[str, Any],
    strategy: Strategy,
    dtype: torch.dtype,
    on_tensor: Callable[[torch.Tensor], None],
) -> LayerContext:
    """Return what layers over the ranks of `comm` are built from; `on_tensor` is called with each tensor taken."""
    plan = plan_shards(tensor_table(config), strategy, comm.size)

    def take(name: str) -> torch.Tensor:
        tensor = random_tensor(plan[name], comm.rank, machine.device, dtype)
        on_tensor(tensor)
        return tensor

    return LayerContext(comm, machine.kernels, plan, machine.device, take)


def random_tensor(planned: PlannedTensor, rank: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return rank `rank`'s part of a tensor: normal around 0, a norm's weight 1. The same at every call."""
    shape = planned.local_shape(rank)
    if planned.name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype, device=device)
    # What every rank holds whole must be the same everywhere.
    salt = 0 if planned.axis is None else rank
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{salt} {planned.name}".encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, DEVIATION, generator=generator)
