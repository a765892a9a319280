"""What a rank is doing: for its last words, for its neighbour, and for a small file that outlives it."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "MPI_TP_STATUS_DIR"
"""The environment variable that names the folder of the ranks' status files; without it there are none."""


@dataclass
class Status:
    """Where one of `size` ranks is in its work; `error` is why it ended the job."""

    rank: int
    size: int
    host: str
    device: str | None = None
    phase: str = "start"
    step: int = 0
    error: str | None = None

    def place(self) -> str:
        """Return host, device, phase and step for people."""
        return f"host {self.host}, device {self.device or 'none yet'}, phase {self.phase!r}, step {self.step}"


class StatusFile:
    """`rank-NNNNN.json` in the folder that the environment names, replaced whole whenever the status has changed."""

    def __init__(self, status: Status, environ: Mapping[str, str]) -> None:
        folder = environ.get(FOLDER_VARIABLE)
        self._path = Path(folder, f"rank-{status.rank:05}.json") if folder else None
        self._status = status
        self._written: dict[str, object] = {}

    def write(self) -> None:
        """Write what has changed. A folder that takes no file is no reason to end a job."""
        status = self._status
        facts = {name: getattr(status, name) for name in ("rank", "host", "device", "phase", "step", "error")}
        if self._path is None or facts == self._written:
            return
        temporary = self._path.with_suffix(".new")
        with suppress(OSError):
            temporary.write_text(json.dumps({**facts, "time": time.time()}) + "\n")
            os.replace(temporary, self._path)
        self._written = facts
