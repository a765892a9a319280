"""How large the key/value cache of a transformer is: pure arithmetic, for the engine and for `sharder.inspect`."""

import torch

from mpi_tp.config import ModelConfig
from mpi_tp.partition.ranges import KeyValueHeads


def local_kv_heads(config: ModelConfig, rank: int, size: int) -> int:
    """Return how many key/value heads rank `rank` keeps."""
    heads = KeyValueHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    start, stop = heads.heads(rank, size)
    return stop - start


def bytes_per_token(config: ModelConfig, rank: int, size: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values, over all layers, that rank `rank` keeps a token."""
    return 2 * config.num_hidden_layers * local_kv_heads(config, rank, size) * config.head_dim * dtype.itemsize
