"""The command line of `python -m sharder`."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi_tp.config import ACTIVATIONS
from mpi_tp.options import parse
from mpi_tp.partition.plan import STRATEGIES
from sharder import DTYPES, Sharder
from sharder.program import balance, megabytes, run_program

if TYPE_CHECKING:
    from sharder.convert import Report


def main(argv: Sequence[str]) -> None:
    """Shard one checkpoint, as the command line `argv` says; raises JobError."""
    values = vars(parse(_parser(), argv, {}))
    del values["config"]
    report = Sharder(device_count=values.pop("ranks"), output_dir=values.pop("output"), **values).run()
    if report.lacks_tokenizer:
        print(
            f"warning: no tokenizer.json inside or beside {values['model_path']}: the set takes token ids only; "
            "pass --tokenizer DIR for text",
            file=sys.stderr,
        )
    print(_found(report) if report.found else _summary(report))


def _found(report: "Report") -> str:
    return f"{report.shards.directory}/ already holds this set ({report.shards.set_id}): nothing to do"


def _summary(report: "Report") -> str:
    shards = report.shards
    entries = shards.manifest.tensors.values()
    total = sum(entry.num_bytes for entry in entries)
    by_rank = [sum(entry.local_bytes(rank) for entry in entries) for rank in range(shards.ranks)]
    lines = [
        f"{shards.directory}/: {len(entries)} tensors, {megabytes(total)} for {shards.ranks} ranks ({shards.strategy}) "
        f"in {report.seconds:.1f} s, {megabytes(total / report.seconds)}/s",
        *(f"  rank {rank}: {megabytes(num_bytes)}" for rank, num_bytes in enumerate(by_rank)),
        f"  balance {balance(by_rank)} (largest rank over mean)",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharder", description="Cut a checkpoint into one HDF5 shard file per rank.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model_path", metavar="SOURCE", help="Hugging Face folder, .safetensors, .pt, .bin or .gguf")
    add("--ranks", metavar="N", type=int, required=True, help="number of MPI ranks to shard for")
    add("-o", "--output", metavar="DIR", default="shards", help="folder of the set (%(default)s)")
    add("--strategy", choices=STRATEGIES, default="column_wise", help="how layers are split (%(default)s)")
    add("--dtype", choices=DTYPES, default="source", help="what all tensors are cast to (%(default)s)")
    add("--model-config", metavar="FILE", help="config.json to use instead of the one in or beside SOURCE")
    add("--tokenizer", metavar="DIR", help="folder of tokenizer.json to use instead of the one in or beside SOURCE")
    add("--activation", choices=ACTIVATIONS, help="what stands between the layers of a plain stack of linear layers")
    add("--overwrite", action="store_true", help="replace whatever set DIR holds")
    add(
        "--verify-source",
        action="store_true",
        help="compare every tensor with SOURCE, not only size and header, before a set in DIR is called the same",
    )
    add("--config", metavar="FILE", help="YAML file with values for these flags; the command line wins")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(main))
