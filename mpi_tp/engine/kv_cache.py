"""The paged key/value cache: blocks of tokens, dealt out by rank 0, held by every rank for its own heads."""

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.kernels.base import Cache
from mpi_tp.models.cache_size import local_kv_heads

BLOCK_SIZE = 16
"""Tokens in a block."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks hold `num_tokens`."""
    return -(-num_tokens // BLOCK_SIZE)


def allocate_cache(
    config: ModelConfig, num_blocks: int, rank: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[Cache]:
    """Return uninitialised keys and values, [num_blocks, BLOCK_SIZE, heads, head_dim] each, of every layer."""
    shape = (num_blocks, BLOCK_SIZE, local_kv_heads(config, rank, size), config.head_dim)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(config.num_hidden_layers)
    ]
