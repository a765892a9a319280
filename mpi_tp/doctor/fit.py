"""The row about memory: that each rank's part of the model fits where it will be, with keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.devices import rank_names
from mpi_tp.doctor.panel import Check
from mpi_tp.doctor.rows import Row, ok, warning
from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels import select
from mpi_tp.memory import CPU_SHARE, GPU_SHARE, available_bytes
from mpi_tp.models.cache_size import bytes_per_token
from mpi_tp.models.families import parse_config
from mpi_tp.shards.reader import ShardSet


@dataclass(frozen=True)
class Need:
    """What one rank needs, in bytes, and what is free where it needs that: together with the ranks of the same `pool`.

    `share` is the part of what the weights leave that the key/value cache may take; `token_bytes` is 0 without one.
    """

    pool: str
    free: int
    weights: int
    token_bytes: int
    share: float


def memory_check(shards: ShardSet, pool: str, part: int, device: torch.device) -> Check[Need]:
    """That the model fits in memory; `part` is the rank of the set whose file this rank loads."""
    config = parse_config(shards.config)
    context = config.max_position_embeddings if isinstance(config, ModelConfig) else 0

    def probe() -> Need:
        weights = sum(entry.local_bytes(part) for entry in shards.manifest.tensors.values())
        dtype = select(device, "auto", shards.weights_dtype).activation_dtype or shards.weights_dtype
        tokens = bytes_per_token(config, part, shards.ranks, dtype) if isinstance(config, ModelConfig) else 0
        return Need(pool, available_bytes(device), weights, tokens, GPU_SHARE if device.type == "cuda" else CPU_SHARE)

    return Check("memory", probe, lambda needs: judge_memory(needs, context))


def judge_memory(needs: Sequence[Need], context: int) -> Row:
    """Compare what each host's memory, or each GPU, has free with what its ranks need.

    Raises ConfigurationError if the weights do not fit, or no block of the key/value cache beside them. `context` is
    the model's, in tokens.
    """
    rooms = []
    for pool in dict.fromkeys(need.pool for need in needs):
        ranks = [rank for rank, need in enumerate(needs) if need.pool == pool]
        own = [needs[rank] for rank in ranks]
        free, weights = min(need.free for need in own), sum(need.weights for need in own)
        cache = max(free - weights, 0) * own[0].share / len(own)
        room = min((int(cache / need.token_bytes) for need in own if need.token_bytes), default=None)
        if weights > free or (room is not None and room < BLOCK_SIZE):
            raise ConfigurationError(
                f"{rank_names(ranks)} need {_mib(weights)} of {pool} for weights alone and {_mib(free)} are free: use "
                "more ranks or hosts, or a narrower --dtype"
            )
        rooms.append((room, pool, weights, free))
    tightest = min(rooms, key=lambda item: float("inf") if item[0] is None else item[0])
    room, pool, weights, free = tightest
    text = f"weights need {_mib(weights)} of {pool} and {_mib(free)} are free"
    if room is None:
        return ok(text)
    text = f"{text}, which leaves room for {room:,} tokens of keys and values"
    if room < context:
        return warning(f"{text}, less than the model's context of {context:,}: use more ranks for long prompts")
    return ok(text)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
