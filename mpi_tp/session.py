"""One rank's part of a model, ready to run: the way from weights to an engine that all programs share."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.world import all_gather_object
from mpi_tp.config import MLPConfig, ModelConfig
from mpi_tp.devices import choose_device, connect, ranks_sharing
from mpi_tp.engine.base import ServingEngine
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine, follow
from mpi_tp.engine.kv_cache import BLOCK_SIZE, allocate_cache, blocks_for
from mpi_tp.engine.replica import serve_replica
from mpi_tp.engine.replicated import ReplicatedEngine
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
from mpi_tp.replicas import Replicas, divide
from mpi_tp.shards.reader import ShardSet
from mpi_tp.tokenizer import Tokenizer
from mpi_tp.versions import check_same_versions, versions

Follow = Callable[[Callable[[], None]], None]
"""Runs what rank 0 wants until it closes its engine; calls its argument whenever there is progress."""


@dataclass(frozen=True)
class Machine:
    """Where one rank computes and by which kernels, and what it reaches the other ranks of its replica through."""

    job: Job
    options: MachineOptions
    device: torch.device
    kernels: Kernels
    replicas: Replicas
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
    replicas: Replicas
    comm: Communicator
    model: CausalLM | MLPStack
    load_figures: LoadFigures


def open_shards(job: Job, directory: Path, tensor_parallel: int | None = None) -> ShardSet:
    """Open the shard set of the job's ranks, or of each replica's of `tensor_parallel` ranks; collective.

    Raises FileError and ConfigurationError as `ShardSet` does.
    """
    with job.phase("checking the shard set"):
        shards = ShardSet.open(directory)
        shards.check_ranks(job.size, tensor_parallel)
    return shards


def open_machine(job: Job, options: MachineOptions, weights_dtype: torch.dtype, ranks: int | None = None) -> Machine:
    """Choose devices and kernels and connect the ranks of each replica; collective.

    A replica has `ranks` ranks, which the job's are a multiple of; None takes all of them. Raises ConfigurationError,
    on all ranks alike, where these do not fit together.
    """
    with job.phase("comparing versions"):
        hosts, by_rank = zip(*all_gather_object(job.world, (socket.gethostname(), versions())), strict=True)
        check_same_versions(hosts, by_rank)
    with job.phase("choosing devices"):
        device = choose_device(job.world, options.device, options.share_gpu)
        job.status.device = str(device)
        kernels = select(device, options.numerics, weights_dtype)
    with job.phase("connecting"):
        replicas = divide(job.world, ranks or job.size)
        comm = connect(replicas.ranks, options.comm, device, options.share_gpu)
    job.watch(comm.failure)
    return Machine(job, options, device, kernels, replicas, comm)


def open_session(job: Job, shards: ShardSet, options: MachineOptions) -> Session:
    """Choose devices, connect the ranks and load the model; collective.

    Raises FileError and ConfigurationError, on all ranks alike, as each of these steps does.
    """
    return load_shards(open_machine(job, options, shards.weights_dtype, shards.ranks), shards)


def load_shards(machine: Machine, shards: ShardSet) -> Session:
    """Load this rank's part of the set's model; collective. Raises FileError and ConfigurationError as `load_model`."""
    job = machine.job
    with job.phase("loading"), shards.open_rank(machine.comm.rank) as rank_file:
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
    return Session(
        machine.job,
        shards,
        config,
        machine.options,
        machine.device,
        dtype,
        machine.replicas,
        machine.comm,
        model,
        figures,
    )


def open_runner(session: Session) -> Runner:
    """Allocate the key/value cache of a language model; collective.

    Raises ConfigurationError, on all ranks alike, if a rank has no room for it.
    """
    job, comm, config, model = session.job, session.comm, session.config, session.model
    assert isinstance(config, ModelConfig), f"no language model: {config.model_type}"
    assert isinstance(model, CausalLM), f"no language model: {model}"
    spare = 1 if session.device.type == "cuda" else 0  # a block that the GPU's runner takes for itself
    block_bytes = BLOCK_SIZE * bytes_per_token(config, comm.rank, comm.size, session.dtype)
    wanted = session.options.max_batch_size * blocks_for(config.max_position_embeddings) + spare
    with job.phase("allocating the key/value cache"):
        budget = session.options.kv_memory or cache_budget(session.device, ranks_sharing(job.world, session.device))
        num_blocks, rank = min(
            (num, rank) for rank, num in enumerate(all_gather_object(job.world, budget // block_bytes))
        )
        if num_blocks <= spare:
            raise ConfigurationError(
                f"the key/value cache needs {block_bytes} bytes on a rank for {BLOCK_SIZE} tokens, and rank {rank} has "
                "less: raise --kv-memory, or use more ranks"
            )
        num_blocks = min(num_blocks, wanted)
        what = f"a key/value cache of {num_blocks * block_bytes} bytes on rank {job.rank}"
        with fitting(what, "lower --kv-memory or --max-batch-size"):
            caches = allocate_cache(config, num_blocks, comm.rank, comm.size, session.dtype, session.device)
            return _make_runner(session, model, caches, config.max_position_embeddings)


def _make_runner(session: Session, model: CausalLM, caches: list[Cache], max_length: int) -> Runner:
    if session.device.type == "cpu":
        return HostRunner(model, caches)
    from mpi_tp.engine.device_runner import DeviceRunner  # which brings Triton

    size = session.options.max_batch_size
    return DeviceRunner(model, caches, session.comm, session.device, max_batch_size=size, max_length=max_length)


def open_engine(session: Session, runner: Runner) -> tuple[ServingEngine | None, Follow]:
    """Return rank 0's engine, None on the others, and what those do meanwhile; collective.

    Loads the set's tokenizer, if there is one, on the first rank of each replica. Raises FileError if it is damaged.
    """
    job, replicas = session.job, session.replicas
    with job.phase("loading the tokenizer"):
        engine = _make_engine(session, runner) if session.comm.rank == 0 else None
    if engine is None:
        return None, partial(follow, session.comm, runner)
    if replicas.mail is None:
        return engine, _lead
    if replicas.index > 0:
        return None, partial(serve_replica, engine, replicas.mail)
    return ReplicatedEngine(engine, replicas.mail, session.options.max_batch_size, job.stall_timeout), _lead


def _lead(on_step: Callable[[], None]) -> None:
    raise AssertionError("rank 0 has an engine and follows nobody")


def _make_engine(session: Session, runner: Runner) -> Engine:
    config = session.config
    assert isinstance(config, ModelConfig), f"no language model: {config.model_type}"
    folder = session.shards.open_tokenizer() if session.shards else None
    tokenizer = Tokenizer.load(folder) if folder else None
    return Engine(
        session.comm,
        runner,
        Scheduler(BlockPool(runner.num_blocks), session.options.max_batch_size, STEP_TOKENS[session.device.type]),
        tokenizer,
        context_length=config.max_position_embeddings,
        eos_token_ids=frozenset(config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        vocab_size=config.vocab_size,
    )
