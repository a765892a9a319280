"""Prints the peak memory in bytes of a batch of COUNT records that all come before the first, and of its resumption."""

import resource
import sys
from pathlib import Path

from mpi_tp.engine.request import SamplingParams
from mpi_tp.records import InputLine, LineKeys, ResumableWriter, open_earlier

output, count = Path(sys.argv[1]), int(sys.argv[2])


class Death(Exception):
    """The end of the first run."""


def run(stop: bool) -> None:
    lines = (InputLine(number, number, f"prompt {number}", SamplingParams()) for number in range(1, count + 1))
    with open_earlier(output, True, lambda: None) as earlier:
        writer = ResumableWriter(earlier, LineKeys({}))
        for index, line in writer.pending(lines):
            if index or not stop:
                writer.write(index, {"id": line.id, "text": "x" * 200}, line)
        if stop:
            raise Death
        writer.finish(lambda: None)


try:
    run(stop=True)
except Death:
    run(stop=False)
assert output.read_bytes().count(b"\n") == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
