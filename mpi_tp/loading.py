"""From a rank's shard file to a model on its device."""

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
from mpi_tp.shards.reader import RankFile, ShardSet


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
    plan = check_plan(shards)
    taken: dict[str, int] = {}
    # Kernels that compute in the weights' dtype need one for all: norms and biases are often stored wider.
    dtype = shards.weights_dtype if kernels.activation_dtype is None else None

    def take(name: str) -> torch.Tensor:
        assert name not in taken, f"{name} was taken twice"
        tensor = rank_file.read(name)
        taken[name] = tensor.nbytes
        tensor = tensor.to(device, dtype)
        on_progress()
        return tensor

    start = time.perf_counter()
    config = parse_config(shards.config)
    context = LayerContext(comm, kernels, plan, device, take)
    with fitting(f"rank {comm.rank}'s part of the model on its {device.type}", "use more ranks"):
        model = MLPStack(context, config) if isinstance(config, MLPConfig) else CausalLM(context, config)
    assert taken.keys() == plan.keys(), f"tensors that no layer took: {sorted(plan.keys() - taken.keys())}"
    return model, LoadFigures(sum(taken.values()), time.perf_counter() - start)
