"""What NCCL says about its choices, in its own log."""

import os
import re
from pathlib import Path

_CHOICE = re.compile(r"\w+: \d+ Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)")


class NcclLog:
    """The log of this process's NCCL, in a file; make it before NCCL's first call, which reads the settings.

    NCCL cannot be told to stop: each eager collective of this rank is slower by the writing of one line. What a graph
    replays writes nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING", NCCL_DEBUG_FILE=str(path))

    def newest_choice(self) -> str | None:
        """Return algorithm and protocol of the last collective since this was asked before; None if there is none."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            file.seek(self._seen)
            new = file.read()
        self._seen += len(new)
        return last_choice(new.decode(errors="replace"))


def last_choice(text: str) -> str | None:
    """Return the last algorithm and protocol that stand in the log, like `RING LL`."""
    choices = [f"{match['algorithm']} {match['protocol']}" for match in _CHOICE.finditer(text)]
    return choices[-1] if choices else None
