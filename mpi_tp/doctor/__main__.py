"""`mpirun -np N python -m mpi_tp.doctor`: a row for each thing that a job needs, and what to do where it is wrong."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mpi_tp import launch
from mpi_tp.doctor.rows import Report, failure
from mpi_tp.errors import ConfigurationError
from mpi_tp.launcher import check_launcher
from mpi_tp.options import parse


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Read the options, then examine all ranks."""
    with launch.before_mpi():
        args = parse(_parser(), sys.argv[1:] if argv is None else argv, {})
    from mpi_tp.doctor.examination import examine  # torch, which --help and a wrong flag need not wait for

    shards = None if args.shards is None else Path(args.shards)
    launch.run(lambda job: examine(job.world, shards), check_world=_check_world)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpi_tp.doctor",
        description="Check, under the launcher that a job will use, what the job stands on: a row each, failures last.",
        epilog="example: mpirun -np 2 python -m mpi_tp.doctor --shards shards",
        allow_abbrev=False,
    )
    parser.add_argument("--shards", metavar="DIR", help="the shard set that the job will load (none: check the rest)")
    parser.add_argument("--config", metavar="FILE", help="a YAML file that sets these flags; the flag wins")
    return parser


def _check_world(world_size: int, environ: Mapping[str, str]) -> None:
    """Report ranks that are no world as a row. Nothing else can be checked then."""
    try:
        check_launcher(world_size, environ)
    except ConfigurationError as error:
        report = Report(sys.stdout)
        report.add("launcher", failure(str(error)))
        sys.exit(report.close())


if __name__ == "__main__":
    main()
