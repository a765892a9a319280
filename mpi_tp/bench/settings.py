"""What a measurement is asked to do, as the command line says it. No torch: the command line is read without."""

from dataclasses import dataclass
from pathlib import Path

from mpi_tp.bench.shapes import Shape
from mpi_tp.machine_options import MachineOptions
from mpi_tp.partition.plan import Strategy

WARM_UP_STEPS = 8
"""Of decoding, before the clock runs: caches fill, and what is compiled or captured at first use is."""


@dataclass(frozen=True)
class ModelChoice:
    """A shard set, or a shape with random weights, of which `strategy` and `dtype` say how they are split and stored.

    One of `shards` and `shape` is None.
    """

    shards: Path | None
    shape: Shape | None
    strategy: Strategy
    dtype: str

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.shape.name if self.shape else str(self.shards)


@dataclass(frozen=True)
class DecodeOptions:
    """`context` is the mean number of tokens that a step sees before its own."""

    model: ModelChoice
    batch_sizes: tuple[int, ...]
    context: int
    steps: int


@dataclass(frozen=True)
class ThroughputOptions:
    """Lengths in tokens are drawn uniformly from `input_len` and `output_len`, both ends included."""

    model: ModelChoice
    requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int


@dataclass(frozen=True)
class LoadOptions:
    """How often the set is loaded, and read raw."""

    shards: Path
    rounds: int


@dataclass(frozen=True)
class CommOptions:
    """`model` None measures no model's own sizes; `dtype` is that of the messages."""

    model: ModelChoice | None
    dtype: str


@dataclass(frozen=True)
class LinearOptions:
    """x has `batch` * `seq` rows of `hidden` features."""

    batch: int
    seq: int
    hidden: int


Settings = DecodeOptions | ThroughputOptions | LoadOptions | CommOptions | LinearOptions


@dataclass(frozen=True)
class BenchOptions:
    """One measurement and where its results go; `stall_timeout` in seconds."""

    command: str
    settings: Settings
    machine: MachineOptions
    stall_timeout: float
    json: Path | None
    plot: Path | None
