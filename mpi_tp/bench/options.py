"""The command line of `python -m mpi_tp.bench`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mpi_tp.bench.settings import (
    WARM_UP_STEPS,
    BenchOptions,
    CommOptions,
    DecodeOptions,
    LinearOptions,
    LoadOptions,
    ModelChoice,
    Settings,
    ThroughputOptions,
)
from mpi_tp.bench.shapes import Shape, find_shape
from mpi_tp.errors import UsageError
from mpi_tp.infer_options import (
    SECTIONS,
    Flags,
    add_batch_size_flag,
    add_device_flags,
    add_kv_memory_flag,
    add_tensor_parallel_flag,
)
from mpi_tp.machine_options import MachineOptions
from mpi_tp.options import parse, positive_int
from mpi_tp.partition.plan import STRATEGIES

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Command:
    """A measurement on the command line: what it is, its flags, and how its settings follow from them."""

    help: str
    add_flags: Callable[[Flags], None]
    settings: Callable[[argparse.Namespace], Settings]


def parse_options(argv: Sequence[str]) -> BenchOptions:
    """Read the command line and its configuration file.

    Raises UsageError (and, as argparse does, exits with 2) for what makes no sense, FileError for a file that cannot be
    read.
    """
    name: str = _top_parser().parse_args(argv[:1]).command
    parser = _parser(name)
    args = parse(parser, argv[1:], _sections(parser))
    settings = COMMANDS[name].settings(args)
    if isinstance(settings, DecodeOptions):
        args.max_batch_size = max(settings.batch_sizes)
    machine = {field.name: getattr(args, field.name) for field in fields(MachineOptions) if field.name in args}
    return BenchOptions(name, settings, MachineOptions(**machine), args.stall_timeout, args.json, args.plot)


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpi_tp.bench",
        description="Measure how fast the ranks of mpirun are, and against what this machine could do.",
        epilog="COMMAND --help lists its flags; example: mpirun -np 2 python -m mpi_tp.bench decode --shape llama-3-8b",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    summary = "\n".join(f"{name:<12}{command.help}" for name, command in COMMANDS.items())
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=summary)
    return parser


def _parser(name: str) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m mpi_tp.bench {name}", description=f"Measure {command.help}.", allow_abbrev=False
    )
    command.add_flags(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write results, versions, hardware and settings")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the results (needs matplotlib)")
    parser.add_argument("--config", metavar="FILE", help="a YAML file that sets any of these flags; the flag wins")
    add_device_flags(parser.add_argument_group("ranks and devices"))
    return parser


def _sections(parser: argparse.ArgumentParser) -> Mapping[str, Mapping[str, str]]:
    """Return the sections of `infer`'s configuration file, as far as this parser has their flags."""
    known = {action.dest for action in parser._actions}
    return {
        section: {key: dest for key, dest in keys.items() if dest in known}
        for section, keys in SECTIONS.items()
        if known & set(keys.values())
    }


# --- argument types ---


def int_list(text: str) -> tuple[int, ...]:
    """Read whole numbers of at least 1, with commas between them, for argparse."""
    return tuple(positive_int(part.strip()) for part in text.split(","))


def int_range(text: str) -> tuple[int, int]:
    """Read a range `a:b` of whole numbers, or one number, for argparse."""
    low, _, high = text.partition(":")
    bounds = positive_int(low), positive_int(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range: {bounds[0]} is more than {bounds[1]}")
    return bounds


# --- flags and settings, command by command ---


def _add_model_flags(flags: Flags) -> None:
    flags.add_argument("--shards", metavar="DIR", help="a shard set made by python -m sharder (shards)")
    flags.add_argument(
        "--shape", metavar="NAME", type=find_shape, help="instead: random weights for a model's name or config.json"
    )
    flags.add_argument("--strategy", choices=STRATEGIES, help="how --shape is split (column_wise)")
    flags.add_argument("--dtype", choices=DTYPES, help="of the weights of --shape (bfloat16)")


def _model_choice(args: argparse.Namespace, for_shapes: Sequence[str] = ("strategy", "dtype")) -> ModelChoice:
    """Return the model that the flags name; those of `for_shapes` say nothing about a shard set."""
    shape: Shape | None = args.shape
    if shape and args.shards:
        raise UsageError(f"--shards {args.shards} and --shape {shape.name} are two models: choose one")
    for flag in for_shapes:
        if not shape and getattr(args, flag):
            raise UsageError(f"--{flag} {getattr(args, flag)} is for --shape: a shard set has its own")
    shards = None if shape else Path(args.shards or "shards")
    return ModelChoice(shards, shape, args.strategy or "column_wise", args.dtype or "bfloat16")


def _add_decode_flags(flags: Flags) -> None:
    _add_model_flags(flags)
    add_kv_memory_flag(flags)
    flags.add_argument(
        "--batch-sizes",
        metavar="B,…",
        type=int_list,
        default=(1, 8, 32, 128),
        help="sequences that decode at once (1,8,32,128)",
    )
    flags.add_argument(
        "--context", metavar="N", type=positive_int, default=256, help="mean tokens before the new one (%(default)s)"
    )
    flags.add_argument("--steps", metavar="N", type=positive_int, default=200, help="steps that count (%(default)s)")


def _decode_options(args: argparse.Namespace) -> DecodeOptions:
    most = 2 * (args.context - WARM_UP_STEPS) - 1
    if args.steps > most:
        raise UsageError(
            f"--steps {args.steps} with a mean --context of {args.context} leaves no prompt: "
            f"use at most {max(most, 0)} steps, or a context of {args.steps // 2 + WARM_UP_STEPS + 1} or more"
        )
    return DecodeOptions(_model_choice(args), args.batch_sizes, args.context, args.steps)


def _add_throughput_flags(flags: Flags) -> None:
    _add_model_flags(flags)
    add_batch_size_flag(flags, default=256)
    add_kv_memory_flag(flags)
    add_tensor_parallel_flag(flags)
    flags.add_argument("--requests", metavar="N", type=positive_int, default=256, help="all at once (%(default)s)")
    for flag, what in (("--input-len", "prompt"), ("--output-len", "answer")):
        flags.add_argument(
            flag, metavar="A:B", type=int_range, default=(100, 1024), help=f"tokens of each {what}, uniform (100:1024)"
        )
    flags.add_argument("--seed", metavar="N", type=int, default=0, help="of lengths and prompts (%(default)s)")


def _throughput_options(args: argparse.Namespace) -> ThroughputOptions:
    return ThroughputOptions(_model_choice(args), args.requests, args.input_len, args.output_len, args.seed)


def _add_load_flags(flags: Flags) -> None:
    flags.add_argument("--shards", metavar="DIR", type=Path, default=Path("shards"), help="the shard set (%(default)s)")
    flags.add_argument("--rounds", metavar="N", type=positive_int, default=5, help="loads that count (%(default)s)")


def _add_comm_flags(flags: Flags) -> None:
    flags.add_argument("--shards", metavar="DIR", help="measure the sizes of this set's messages too")
    flags.add_argument("--shape", metavar="NAME", type=find_shape, help="or of this model's, by name or config.json")
    flags.add_argument("--strategy", choices=STRATEGIES, help="how --shape is split (column_wise)")
    flags.add_argument("--dtype", choices=DTYPES, help="of the messages (bfloat16)")


def _comm_options(args: argparse.Namespace) -> CommOptions:
    has_model = args.shards or args.shape or args.strategy
    model = _model_choice(args, for_shapes=("strategy",)) if has_model else None
    return CommOptions(model, args.dtype or "bfloat16")


def _add_linear_flags(flags: Flags) -> None:
    for name, default in (("batch", 1), ("seq", 128), ("hidden", 1024)):
        flags.add_argument(f"--{name}", metavar="N", type=positive_int, default=default, help="(%(default)s)")


COMMANDS: Mapping[str, Command] = {
    "decode": Command(
        "one token a step for each of B sequences: ms, tokens/s, weight GB/s",
        _add_decode_flags,
        _decode_options,
    ),
    "throughput": Command(
        "a queue of requests submitted at once: tokens/s and waiting times",
        _add_throughput_flags,
        _throughput_options,
    ),
    "load": Command(
        "loading a shard set, against reading its files raw",
        _add_load_flags,
        lambda args: LoadOptions(args.shards, args.rounds),
    ),
    "comm": Command(
        "collectives by message size: NCCL against MPI through the host",
        _add_comm_flags,
        _comm_options,
    ),
    "linear": Command(
        "two tensor-parallel linear layers, by what joins the ranks",
        _add_linear_flags,
        lambda args: LinearOptions(args.batch, args.seq, args.hidden),
    ),
}
