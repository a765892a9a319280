"""From a rank's shard file to a model on its device."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.config import MLPConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels.base import Kernels
from mpi_tp.layers.context import LayerContext
from mpi_tp.memory import fitting
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.partition.plan import Plan, plan_shards
from mpi_tp.shards.device_copy import DeviceReader
from mpi_tp.shards.read_ahead import ReadAhead
from mpi_tp.shards.reader import RankFile, ShardSet

MAX_READERS = 4
"""Threads that read; more are no faster than the memory is."""
DEVICE_AHEAD_BYTES = 2 << 30
"""Most bytes of tensors that were read and no layer has taken: on a GPU a part of the model, there anyway."""
HOST_AHEAD_BYTES = 64 << 20
"""The same on a CPU for each reader: there weights are packed, and what was read is given back."""


@dataclass(frozen=True)
class LoadFigures:
    """What loading cost this rank."""

    num_bytes: int
    seconds: float


def check_plan(shards: ShardSet) -> Plan:
    """Return the plan of a shard set.

    Raises ConfigurationError if it is not the one that this program's layers are built for.
    """
    plan = plan_shards(tensor_table(shards.config), shards.strategy, shards.ranks)
    if plan != shards.plan:
        name = next(name for name in {**plan, **shards.plan} if plan.get(name) != shards.plan.get(name))
        raise ConfigurationError(
            f"{shards.directory} splits {name} as {shards.plan.get(name)} and this version expects {plan.get(name)}: "
            f"shard again with python -m sharder SOURCE --ranks {shards.ranks}"
        )
    return plan


def load_model(
    shards: ShardSet,
    rank_file: RankFile,
    comm: Communicator,
    kernels: Kernels,
    device: torch.device,
    on_progress: Callable[[], None],
) -> tuple[CausalLM | MLPStack, LoadFigures]:
    """Build the set's model from this rank's file, tensor by tensor; `on_progress` is called after each.

    Raises FileError for damaged data, ConfigurationError for a set of another plan and for too little memory.
    """
    start = time.perf_counter()
    plan = check_plan(shards)
    config = parse_config(shards.config)
    # Kernels that compute in the weights' dtype need one for all: norms and biases are often stored wider.
    dtype = shards.weights_dtype if kernels.activation_dtype is None else None
    taken: set[str] = set()
    fit = fitting(f"rank {comm.rank}'s part of the model on its {device.type}", "use more ranks")
    with fit, _read_ahead(rank_file, device) as tensors:

        def take(name: str) -> torch.Tensor:
            assert name not in taken, f"{name} was taken twice"
            taken.add(name)
            tensor = tensors.take(name).to(dtype=dtype)
            on_progress()
            return tensor

        context = LayerContext(comm, kernels, plan, device, take)
        model = MLPStack(context, config) if isinstance(config, MLPConfig) else CausalLM(context, config)
    assert taken == plan.keys(), f"tensors that no layer took: {sorted(plan.keys() - taken)}"
    if device.type == "cuda":
        # Joined weights leave their parts' memory with torch; the key/value cache goes by what the driver has free.
        torch.cuda.empty_cache()
    num_bytes = sum(part.num_bytes for part in rank_file.tensors.values())
    return model, LoadFigures(num_bytes, time.perf_counter() - start)


def _read_ahead(rank_file: RankFile, device: torch.device) -> ReadAhead:
    """Return the tensors of a rank file on `device`, read by the cores that this rank may use."""
    if device.type == "cuda":
        num_readers = min(len(os.sched_getaffinity(0)), MAX_READERS)
        device_reader = DeviceReader(rank_file, device, num_readers)
        return ReadAhead(rank_file, device, device_reader.read_into, num_readers, DEVICE_AHEAD_BYTES)
    num_threads = torch.get_num_threads()
    # With one thread to compute, which packs the weights too, there is no core to read on meanwhile.
    num_readers = min(num_threads, MAX_READERS) if num_threads > 1 else 0
    return ReadAhead(rank_file, device, rank_file.read_into, num_readers, num_readers * HOST_AHEAD_BYTES)
