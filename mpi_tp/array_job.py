"""Slurm's job arrays: which lines of the input are this task's, and what its output is called."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpi_tp.errors import UsageError

_TASK = "%a"


@dataclass(frozen=True)
class Share:
    """Every `count`-th line of the input, from the one with this index (0-based) on."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"line {self.index + 1} of the input and every {self.count}th after it"

    def has(self, index: int) -> bool:
        """Return whether the line with this index is in the share."""
        return index % self.count == self.index


def array_share(environ: Mapping[str, str]) -> Share:
    """Return the share of this task by Slurm's variables: all lines if it is no array, or one of a single task.

    The lines go round the tasks, so that `paste` puts their outputs back into the order of the input. Raises UsageError
    for an array with gaps, whose tasks do not know their place.
    """
    count = _number(environ, "COUNT", 1)
    if count == 1:
        return Share()
    task, first, step = (_number(environ, name, default) for name, default in (("ID", 0), ("MIN", 0), ("STEP", 1)))
    last = first + (count - 1) * step
    index, rest = divmod(task - first, step)
    if rest or not 0 <= index < count or _number(environ, "MAX", last) != last:
        raise UsageError(
            f"the job array has {count} tasks but not each id from {first} to {last} in steps of {step}: lines are "
            "shared out to arrays without gaps, like --array=0-7"
        )
    return Share(index, count)


def task_output(output: Path, environ: Mapping[str, str]) -> Path:
    """Return the task's own output: with its id for `%a`, as in the names that sbatch takes.

    Raises UsageError for a name that the other tasks of the array would write to as well.
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return output
    own = Path(str(output).replace(_TASK, task))
    has_id = re.search(rf"(?<!\d){task}(?!\d)", str(own))
    if not has_id and _number(environ, "COUNT", 1) > 1:
        raise UsageError(f"--output {output}: all tasks of the job array would write it: name it like out-%a.jsonl")
    return own


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    return int(environ.get(f"SLURM_ARRAY_TASK_{name}", default))
