"""One rank's part of a model, ready to run: the way from a shard set to an engine that `infer` and `LLM` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import split_by_host
from mpi_tp.config import ModelConfig
from mpi_tp.devices import choose_device, connect
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.kv_cache import BLOCK_SIZE, BlockPool, allocate_cache, blocks_for, bytes_per_token
from mpi_tp.engine.runner import Runner
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.kernels import select
from mpi_tp.kernels.base import Kernels
from mpi_tp.launch import Job
from mpi_tp.loading import LoadFigures, load_model, weights_dtype
from mpi_tp.memory import cache_budget, check_budget
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.shards.reader import ShardSet
from mpi_tp.tokenizer import Tokenizer


@dataclass(frozen=True)
class MachineOptions:
    """Where and how a model runs; `kv_memory` is in bytes a rank, None for what is free."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    comm: Literal["auto", "nccl", "mpi"] = "auto"
    share_gpu: bool = False
    numerics: Literal["auto", "invariant", "fast"] = "auto"
    max_batch_size: int = 64
    kv_memory: int | None = None


@dataclass(frozen=True)
class Session:
    """What one rank has once its part of the model is loaded."""

    job: Job
    shards: ShardSet
    options: MachineOptions
    device: torch.device
    dtype: torch.dtype
    comm: Communicator
    kernels: Kernels
    model: CausalLM | MLPStack
    load_figures: LoadFigures


def open_shards(job: Job, directory: Path) -> ShardSet:
    """Open the shard set of the job's ranks; collective. Raises FileError and ConfigurationError as `ShardSet` does."""
    with job.phase("checking the shard set"):
        shards = ShardSet.open(directory)
        shards.check_ranks(job.size)
    return shards


def open_session(job: Job, shards: ShardSet, options: MachineOptions) -> Session:
    """Choose devices, connect the ranks and load the model; collective.

    Raises FileError and ConfigurationError, on all ranks alike, as each of these steps does.
    """
    with job.phase("choosing devices"):
        rank_file = shards.open_rank(job.rank)
        dtype = weights_dtype(shards)
        device = choose_device(job.world, options.device, options.share_gpu)
        kernels = select(device, options.numerics, dtype)
    with job.phase("connecting"):
        comm = connect(job.world, options.comm, device, options.share_gpu)
    with job.phase("loading"), rank_file:
        model, figures = load_model(shards, rank_file, comm, kernels, device, job.progress)
    return Session(job, shards, options, device, dtype, comm, kernels, model, figures)


def open_runner(session: Session, config: ModelConfig, model: CausalLM) -> tuple[Runner, int]:
    """Allocate the key/value cache; return the runner and the number of blocks, equal on all ranks; collective."""
    job, options = session.job, session.options
    dtype = session.kernels.activation_dtype or session.dtype
    block_bytes = BLOCK_SIZE * bytes_per_token(config, job.rank, job.size, dtype)
    budget = options.kv_memory or cache_budget(session.device, _ranks_sharing(session))
    wanted = options.max_batch_size * blocks_for(config.max_position_embeddings)
    with job.phase("allocating the key/value cache"):
        num_blocks = min(session.comm.all_gather_object(min(wanted, budget // block_bytes)))
        check_budget(num_blocks, block_bytes, budget)
        caches = allocate_cache(config, num_blocks, job.rank, job.size, dtype, session.device)
    return Runner(model, caches, session.device), num_blocks


def open_engine(session: Session, config: ModelConfig, runner: Runner, num_blocks: int) -> Engine:
    """Return rank 0's engine and load the set's tokenizer into it."""
    folder = session.shards.open_tokenizer()
    tokenizer = Tokenizer.load(folder) if folder else None
    return Engine(
        session.comm,
        runner,
        Scheduler(BlockPool(num_blocks), session.options.max_batch_size),
        tokenizer,
        context_length=config.max_position_embeddings,
        eos_token_ids=frozenset(config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        vocab_size=config.vocab_size,
    )


def _ranks_sharing(session: Session) -> int:
    """How many ranks share this rank's memory: those of the host on CPU, those of one GPU with --share-gpu."""
    on_host = split_by_host(session.job.world).size
    return -(-on_host // torch.cuda.device_count()) if session.device.type == "cuda" else on_host
