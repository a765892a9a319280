"""How much memory there is for the key/value cache, and how much was used."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mpi_tp.errors import ConfigurationError

CPU_SHARE = 0.5
"""Of the memory that is available to the job; the rest is for activations, the page cache and everyone else."""
GPU_SHARE = 0.85
"""Of the GPU's free memory once the weights are loaded; the rest is for activations and the libraries' workspaces."""


def cache_budget(device: torch.device, ranks_sharing: int) -> int:
    """Return the bytes that one of `ranks_sharing` ranks on a device may take for its cache."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) // ranks_sharing
    return int(min(_host_available(), *_cgroups_available()) * CPU_SHARE) // ranks_sharing


@contextmanager
def fitting(what: str, advice: str) -> Iterator[None]:
    """Turn memory that cannot be allocated in the block into a ConfigurationError that gives `advice`."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        # torch has a type for it on GPUs only, and another for sizes that no integer of its own holds
        if "allocate" not in str(error) and "verflow" not in str(error):
            raise
        raise ConfigurationError(f"{what} does not fit in memory: {advice}") from error


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used on its device so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _host_available() -> int:
    return _named_numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024


def _cgroups_available() -> Iterator[int]:
    """Yield what each control group around this process leaves it: a Slurm job, a container; infinity first.

    The page cache that a group can give up counts as free.
    """
    yield 2**63
    own = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    for group in (own, *own.parents):
        limit = group / "memory.max"
        if limit.exists() and limit.read_text().strip() != "max":
            used = int((group / "memory.current").read_text())
            yield int(limit.read_text()) - used + _named_numbers(group / "memory.stat")["inactive_file"]


def _named_numbers(path: Path) -> dict[str, int]:
    """Read a file that has a name and a number a line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
