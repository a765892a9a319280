"""The command line of `python -m mpi_tp.infer`."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from mpi_tp.array_job import Share, array_share, task_output
from mpi_tp.engine.request import SAMPLING_FIELDS, SamplingParams
from mpi_tp.errors import UsageError
from mpi_tp.machine_options import CommChoice, DeviceChoice, MachineOptions, Numerics
from mpi_tp.options import parse, positive_float, positive_int, size

STDIN: Literal["-"] = "-"

SECTIONS = {
    "parallel": {name: name for name in ("device", "share_gpu", "numerics")},
    "communication": {"backend": "comm"},
    "batching": {name: name for name in ("max_batch_size", "kv_memory")},
    "sampling": {name: name for name in sorted(SAMPLING_FIELDS)},
    "monitoring": {"stall_timeout": "stall_timeout"},
}


@dataclass(frozen=True)
class InferOptions:
    """What one run of batch inference is asked to do.

    `input` None stands for the built-in prompts, STDIN for standard input; `output` None is standard output.
    `share` are the lines of a Slurm array task, of the first `limit` of the input. `stall_timeout` is in seconds.
    """

    shards: Path
    input: Path | Literal["-"] | None
    output: Path | None
    sampling: SamplingParams
    chat: bool
    system: str | None
    limit: int | None
    resume: bool
    share: Share
    machine: MachineOptions
    stall_timeout: float


def parse_options(argv: Sequence[str]) -> InferOptions:
    """Read the command line and its configuration file.

    Raises UsageError (and, as argparse does, exits with 2) for what makes no sense, FileError for a configuration file
    that cannot be read.
    """
    args = parse(_parser(), argv, SECTIONS)
    values = vars(args)
    del values["config"]
    values["stop"] = tuple(args.stop or ())
    sampling = SamplingParams(**{name: values.pop(name) for name in SAMPLING_FIELDS})
    machine = MachineOptions(**{field.name: values.pop(field.name) for field in fields(MachineOptions)})
    values["shards"] = Path(args.shards)
    values["input"] = args.input if args.input in (None, STDIN) else Path(args.input)
    values["output"] = None if args.output in (None, "-") else task_output(Path(args.output), os.environ)
    values["share"] = array_share(os.environ)
    return _consistent(InferOptions(sampling=sampling, machine=machine, **values))


def _consistent(options: InferOptions) -> InferOptions:
    if options.system is not None and not options.chat:
        raise UsageError(f"--system {options.system!r} goes in front of chat prompts only: add --chat")
    if options.resume and (options.output is None or _is_device(options.output)):
        raise UsageError("--resume goes on from the journal beside an output file: name one with --output FILE")
    same = isinstance(options.input, Path) and options.output and options.input.resolve() == options.output.resolve()
    if same:
        raise UsageError(f"--input and --output are both {options.input}: name another output")
    return options


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


class Flags(Protocol):
    """A parser or a group of it."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add a flag, as argparse does."""
        ...


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpi_tp.infer",
        description="Generate text for a batch of prompts with a model that is sharded over MPI ranks.",
        epilog="example: mpirun -np 2 python -m mpi_tp.infer --input prompts.jsonl --output results.jsonl",
        allow_abbrev=False,
    )
    _add_files(parser)
    _add_sampling(parser.add_argument_group("sampling", "options on an input line win over these"))
    machine = parser.add_argument_group("ranks, devices and batching")
    add_device_flags(machine)
    add_batch_size_flag(machine, default=64)
    add_kv_memory_flag(machine)
    return parser


def _add_files(flags: Flags) -> None:
    flags.add_argument(
        "--shards", metavar="DIR", default="shards", help="the shard set, made by python -m sharder (%(default)s)"
    )
    flags.add_argument(
        "--input",
        metavar="FILE",
        help="prompts: JSON Lines (also .gz, also OpenAI's batch format), *.txt with one prompt a line, - for standard "
        "input; for an MLP set .npy or .h5[:dataset] (a few built-in prompts, or random rows)",
    )
    flags.add_argument(
        "--output",
        metavar="FILE",
        help="one record a line, in input order; it appears when the job is done, until then FILE.journal holds the "
        "records; %%a is the task id of a Slurm array (stdout)",
    )
    flags.add_argument(
        "--resume",
        action="store_true",
        help="go on with FILE.journal of --output FILE, if there is one: serve the lines that it does not answer",
    )
    flags.add_argument("--limit", metavar="N", type=positive_int, help="stop after N input lines")
    flags.add_argument("--chat", action="store_true", help="send each plain prompt as a user's chat message")
    flags.add_argument("--system", metavar="TEXT", help="with --chat, the system message in front of each prompt")
    flags.add_argument("--config", metavar="FILE", help="a YAML file that sets any of these flags; the flag wins")


def _add_sampling(flags: Flags) -> None:
    default = SamplingParams()
    flags.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=default.max_new_tokens,
        help="most tokens to generate for a prompt (%(default)s)",
    )
    flags.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=default.temperature,
        help="0 takes the likeliest token, more is more random (%(default)s)",
    )
    flags.add_argument("--top-k", metavar="K", type=int, help="choose among the K likeliest tokens (all)")
    flags.add_argument(
        "--top-p", metavar="P", type=float, help="choose among the likeliest tokens that together reach P (all)"
    )
    flags.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=default.seed,
        help="a line's seed is this plus its number (%(default)s)",
    )
    flags.add_argument("--n", metavar="N", type=int, default=default.n, help="samples of each prompt (%(default)s)")
    flags.add_argument(
        "--stop", metavar="TEXT", action="append", help="end before this text; may be given several times"
    )
    flags.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    flags.add_argument("--logprobs", action="store_true", help="add the log-probability of each token")


def add_device_flags(flags: Flags) -> None:
    """Add what says where a model runs, and when a job has stalled."""
    flags.add_argument(
        "--comm",
        choices=get_args(CommChoice),
        default="auto",
        help="what carries tensors between ranks: NCCL, or MPI through host memory (%(default)s)",
    )
    flags.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU (with --comm mpi)")
    flags.add_argument(
        "--device", choices=get_args(DeviceChoice), default="auto", help="where the model runs (%(default)s)"
    )
    flags.add_argument(
        "--numerics",
        choices=get_args(Numerics),
        default="auto",
        help="invariant: a prompt's result has the same bits in any batch and on any number of ranks; fast: the same "
        "within rounding; auto: invariant on CPU, fast on GPU",
    )
    flags.add_argument(
        "--stall-timeout",
        metavar="SECONDS",
        type=positive_float,
        default=300.0,
        help="end the job when a rank makes no progress for this long (%(default)g)",
    )


def add_batch_size_flag(flags: Flags, default: int) -> None:
    """Add the bound on sequences that run at once."""
    flags.add_argument(
        "--max-batch-size",
        metavar="B",
        type=positive_int,
        default=default,
        help="most sequences that run at once (%(default)s)",
    )


def add_kv_memory_flag(flags: Flags) -> None:
    """Add the size of the key/value cache."""
    flags.add_argument(
        "--kv-memory",
        metavar="SIZE",
        type=size,
        help="memory of each rank for keys and values, like 512M, 4GiB (what is free)",
    )
