"""How much memory there is for the key/value cache, and how much was used."""

import resource
from pathlib import Path

import torch

from mpi_tp.errors import ConfigurationError

CPU_SHARE = 0.5
"""Of the host's available memory; the rest is for activations, the page cache and everyone else."""
GPU_SHARE = 0.85
"""Of the GPU's free memory once the weights are loaded; the rest is for activations and the libraries' workspaces."""


def cache_budget(device: torch.device, ranks_sharing: int) -> int:
    """Return the bytes that one of `ranks_sharing` ranks on a device may take for its cache."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) // ranks_sharing
    return int(_available_host_bytes() * CPU_SHARE) // ranks_sharing


def check_budget(num_blocks: int, block_bytes: int, budget: int) -> None:
    """Raise ConfigurationError unless the budget holds a block at least."""
    if num_blocks < 1:
        raise ConfigurationError(
            f"the key/value cache may take {budget} bytes on this rank and its smallest part takes {block_bytes}: "
            "raise --kv-memory, or use more ranks"
        )


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used on its device so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _available_host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
