"""Offline: cuts a checkpoint into one HDF5 shard file per rank. Needs no MPI and no GPU."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mpi_tp.config import ACTIVATIONS
from mpi_tp.errors import UsageError
from mpi_tp.partition.plan import STRATEGIES, Strategy

if TYPE_CHECKING:
    from sharder.convert import Report

DTYPES = ("source", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Sharder:
    """One conversion of the checkpoint at `model_path` into a shard set in `output_dir`, for `device_count` ranks.

    `dtype` "source" keeps every tensor's own. `model_config` (a file) and `tokenizer` (a folder) win over what lies in
    or beside the checkpoint; `activation` is that of a plain stack of linear layers, which a state dict does not tell.
    `overwrite` replaces another set in `output_dir`; `verify_source` compares every tensor before it calls a set that
    is already there the same. Raises UsageError for values that make no sense.
    """

    model_path: str | os.PathLike[str]
    device_count: int
    output_dir: str | os.PathLike[str] = "shards"
    strategy: Strategy = "column_wise"
    dtype: Literal["source", "bfloat16", "float16", "float32"] = "source"
    model_config: str | os.PathLike[str] | None = None
    tokenizer: str | os.PathLike[str] | None = None
    activation: str | None = None
    overwrite: bool = False
    verify_source: bool = False

    def __post_init__(self) -> None:
        if self.device_count < 1:
            raise UsageError(f"the number of ranks is {self.device_count}: it must be at least 1")
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.activation is not None:
            _check_choice("activation", self.activation, ACTIVATIONS)

    def run(self) -> "Report":
        """Write the set, or find that it is already there.

        Raises FileError for files that cannot be read or written, ConfigurationError for a checkpoint, config or
        number of ranks that do not fit together or a folder that holds another set.
        """
        from sharder.convert import convert  # imports torch, which options and --help do without

        return convert(self)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")
