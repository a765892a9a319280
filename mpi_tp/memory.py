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
    share = GPU_SHARE if device.type == "cuda" else CPU_SHARE
    return int(available_bytes(device) * share) // ranks_sharing


def available_bytes(device: torch.device) -> int:
    """Return the memory of a device that is free, for all who use it together."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    memberships = Path("/proc/self/cgroup").read_text()
    return min(_host_available(), *cgroups_available(memberships, Path("/sys/fs/cgroup")))


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


def cgroups_available(memberships: str, root: Path) -> Iterator[int]:
    """Yield what each control group around this process leaves it: a Slurm job, a container; infinity first.

    `memberships` is the text of /proc/self/cgroup, `root` where the groups are mounted. The page cache that a group can
    give up counts as free. A container sees its own group at the root and itself by the host's name for it: hence every
    folder up to the root.
    """
    yield 2**63
    for line in memberships.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            hierarchy, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            hierarchy = root / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = hierarchy / name.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(hierarchy):
                yield from _group_available(group, *files)


def _group_available(group: Path, limit_file: str, used_file: str, cache_name: str) -> Iterator[int]:
    """Yield what one control group leaves, nothing if it has no limit or is not to be seen."""
    path = group / limit_file
    if path.exists() and path.read_text().strip() != "max":
        used = int((group / used_file).read_text())
        yield int(path.read_text()) - used + _named_numbers(group / "memory.stat")[cache_name]


def _named_numbers(path: Path) -> dict[str, int]:
    """Read a file that has a name and a number a line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
