"""One rank's part of a model, ready to run: the way from weights to an engine that all programs share."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.config import MLPConfig, ModelConfig
from mpi_tp.devices import choose_device, connect, ranks_sharing
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.kv_cache import BLOCK_SIZE, allocate_cache, blocks_for
from mpi_tp.engine.runner import HostRunner, Runner
from mpi_tp.engine.scheduler import STEP_TOKENS, Scheduler
from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels import select
from mpi_tp.kernels.base import Cache, Kernels
from mpi_tp.launch import Job
from mpi_tp.loading import LoadFigures, load_model
from mpi_tp.machine_options import MachineOptions
from mpi_tp.memory import cache_budget, fitting
from mpi_tp.models.cache_size import bytes_per_token
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.shards.reader import ShardSet
from mpi_tp.tokenizer import Tokenizer


@dataclass(frozen=True)
class Machine:
    """Where one rank computes and by which kernels, and what it reaches the other ranks through."""

    job: Job
    options: MachineOptions
    device: torch.device
    kernels: Kernels
    comm: Communicator


@dataclass(frozen=True)
class Session:
    """What one rank has once its part of the model is there; `dtype` is that of activations and cache.

    `shards` is None if the weights come from no file.
    """

    job: Job
    shards: ShardSet | None
    config: ModelConfig | MLPConfig
    options: MachineOptions
    device: torch.device
    dtype: torch.dtype
    comm: Communicator
    model: CausalLM | MLPStack
    load_figures: LoadFigures


def open_shards(job: Job, directory: Path) -> ShardSet:
    """Open the shard set of the job's ranks; collective. Raises FileError and ConfigurationError as `ShardSet` does."""
    with job.phase("checking the shard set"):
        shards = ShardSet.open(directory)
        shards.check_ranks(job.size)
    return shards


def open_machine(job: Job, options: MachineOptions, weights_dtype: torch.dtype) -> Machine:
    """Choose devices and kernels and connect the ranks; collective.

    Raises ConfigurationError, on all ranks alike, where these do not fit together.
    """
    with job.phase("choosing devices"):
        device = choose_device(job.world, options.device, options.share_gpu)
        kernels = select(device, options.numerics, weights_dtype)
    with job.phase("connecting"):
        comm = connect(job.world, options.comm, device, options.share_gpu)
    return Machine(job, options, device, kernels, comm)


def open_session(job: Job, shards: ShardSet, options: MachineOptions) -> Session:
    """Choose devices, connect the ranks and load the model; collective.

    Raises FileError and ConfigurationError, on all ranks alike, as each of these steps does.
    """
    return load_shards(open_machine(job, options, shards.weights_dtype), shards)


def load_shards(machine: Machine, shards: ShardSet) -> Session:
    """Load this rank's part of the set's model; collective. Raises FileError and ConfigurationError as `load_model`."""
    job = machine.job
    with job.phase("loading"), shards.open_rank(job.rank) as rank_file:
        model, figures = load_model(shards, rank_file, machine.comm, machine.kernels, machine.device, job.progress)
    return start_session(machine, shards, parse_config(shards.config), shards.weights_dtype, model, figures)


def start_session(
    machine: Machine,
    shards: ShardSet | None,
    config: ModelConfig | MLPConfig,
    weights_dtype: torch.dtype,
    model: CausalLM | MLPStack,
    figures: LoadFigures,
) -> Session:
    """Return the session of a model whose weights are there."""
    dtype = machine.kernels.activation_dtype or weights_dtype
    return Session(machine.job, shards, config, machine.options, machine.device, dtype, machine.comm, model, figures)


def open_runner(session: Session) -> Runner:
    """Allocate the key/value cache of a language model; collective.

    Raises ConfigurationError, on all ranks alike, if a rank has no room for it.
    """
    job, config, model = session.job, session.config, session.model
    assert isinstance(config, ModelConfig), f"no language model: {config.model_type}"
    assert isinstance(model, CausalLM), f"no language model: {model}"
    spare = 1 if session.device.type == "cuda" else 0  # a block that the GPU's runner takes for itself
    block_bytes = BLOCK_SIZE * bytes_per_token(config, job.rank, job.size, session.dtype)
    wanted = session.options.max_batch_size * blocks_for(config.max_position_embeddings) + spare
    with job.phase("allocating the key/value cache"):
        budget = session.options.kv_memory or cache_budget(session.device, ranks_sharing(job.world, session.device))
        num_blocks, rank = min((num, rank) for rank, num in enumerate(job.world.allgather(budget // block_bytes)))
        if num_blocks <= spare:
            raise ConfigurationError(
                f"the key/value cache needs {block_bytes} bytes on a rank for {BLOCK_SIZE} tokens, and rank {rank} has "
                "less: raise --kv-memory, or use more ranks"
            )
        num_blocks = min(num_blocks, wanted)
        what = f"a key/value cache of {num_blocks * block_bytes} bytes on rank {job.rank}"
        with fitting(what, "lower --kv-memory or --max-batch-size"):
            caches = allocate_cache(config, num_blocks, job.rank, job.size, session.dtype, session.device)
            return _make_runner(session, model, caches, config.max_position_embeddings)


def _make_runner(session: Session, model: CausalLM, caches: list[Cache], max_length: int) -> Runner:
    if session.device.type == "cpu":
        return HostRunner(model, caches)
    from mpi_tp.engine.device_runner import DeviceRunner  # which brings Triton

    size = session.options.max_batch_size
    return DeviceRunner(model, caches, session.comm, session.device, max_batch_size=size, max_length=max_length)


def open_engine(session: Session, runner: Runner) -> Engine | None:
    """Load the set's tokenizer, if there is one, and return rank 0's engine, None on the others; collective."""
    job, config = session.job, session.config
    assert isinstance(config, ModelConfig), f"no language model: {config.model_type}"
    with job.phase("loading the tokenizer"):
        folder = session.shards.open_tokenizer() if session.shards and job.rank == 0 else None
        tokenizer = Tokenizer.load(folder) if folder else None
    if job.rank > 0:
        return None
    return Engine(
        session.comm,
        runner,
        Scheduler(BlockPool(runner.num_blocks), session.options.max_batch_size, STEP_TOKENS[session.device.type]),
        tokenizer,
        context_length=config.max_position_embeddings,
        eos_token_ids=frozenset(config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        vocab_size=config.vocab_size,
    )
