"""Results for people and for programs: a table on stdout, a JSON file, a drawing."""

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mpi_tp.bench.settings import BenchOptions
from mpi_tp.run_report import device_name
from mpi_tp.session import Machine
from mpi_tp.versions import versions

Row = Mapping[str, Any]
"""One measurement: texts, numbers, or None for what was not measured here. All rows of a bench have the same keys."""


def describe(options: BenchOptions, machine: Machine) -> dict[str, Any]:
    """Return what the results depend on, hardware of all ranks included; collective."""
    mine = {
        "host": socket.gethostname(),
        "device": device_name(machine.device),
        "cpu": cpu_name(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
    }
    return {
        "command": options.command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions() | {"cuda": torch.version.cuda},
        "comm": type(machine.comm).__name__,
        "hardware": machine.job.world.allgather(mine),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "settings": plain(asdict(options.settings) | asdict(options.machine)),
    }


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo, the architecture where it has none."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def plain(value: object) -> Any:
    """Return settings as JSON can hold them."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def heading(meta: Mapping[str, Any]) -> str:
    """Return one line that says what was measured where."""
    model = meta["settings"].get("model") or meta["settings"]
    name = model["shape"]["name"] if model.get("shape") else model.get("shards")
    ranks = meta["hardware"]
    where = f"{len(ranks)} rank(s) on {ranks[0]['device']}, {ranks[0]['cpu']}"
    return f"{meta['command']}{f' {name}' if name else ''}: {where}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, without columns in which nothing was measured."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [columns] + [[cell(row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def cell(value: str | int | float | None) -> str:
    """Return a value as people read it: four digits, unless it is a whole number."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def as_json(meta: Mapping[str, Any], rows: Sequence[Row]) -> bytes:
    """Return the text of `--json FILE`."""
    return (json.dumps({"meta": meta, "results": list(rows)}, indent=2) + "\n").encode()
