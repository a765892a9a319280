"""The processes of a job that a launcher has started on this host."""

import re
from pathlib import Path


def rank_pids(launcher: int) -> dict[int, int]:
    """Return the process of each rank that descends from the launcher."""
    pids = {}
    for process in Path("/proc").iterdir():
        try:
            parent = int(re.findall(r"PPid:\t(\d+)", (process / "status").read_text())[0])
            environ = (process / "environ").read_bytes()
            rank = re.search(rb"\0(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)\0", environ)
            if rank and parent != 1 and _descends(parent, launcher):
                pids[int(rank[1])] = int(process.name)
        except (OSError, IndexError):
            continue  # no process, one of somebody else, or one that ends now
    return pids


def _descends(pid: int, ancestor: int) -> bool:
    while pid not in (0, ancestor):
        pid = int(re.findall(r"PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
    return pid == ancestor
