"""`mpirun -np N python -m mpi_tp.bench …`: read the options, then run one measurement on every rank."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from mpi_tp import launch
from mpi_tp.bench.options import parse_options


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Read the options, then run the job on every rank."""
    with launch.before_mpi():
        options = parse_options(sys.argv[1:] if argv is None else argv)
    from mpi_tp.bench.job import bench  # torch, which --help and a wrong flag need not wait for

    launch.run(lambda job: bench(job, options), options.stall_timeout)


if __name__ == "__main__":
    main()
