"""Where and how a model runs, as the command line and `LLM` take it. No torch: the command line is read without."""

from dataclasses import dataclass
from typing import Literal, get_args

from mpi_tp.errors import UsageError

DeviceChoice = Literal["auto", "cuda", "cpu"]
CommChoice = Literal["auto", "nccl", "mpi"]
Numerics = Literal["auto", "invariant", "fast"]


@dataclass(frozen=True)
class MachineOptions:
    """Choices that change no result, but for its rounding.

    `kv_memory` is in bytes a rank, None takes what is free. `tensor_parallel` is how many ranks a replica of the model
    is split over, None takes the shard set's own; `max_batch_size` is each replica's.

    Raises UsageError for values that make no sense.
    """

    device: DeviceChoice = "auto"
    comm: CommChoice = "auto"
    share_gpu: bool = False
    numerics: Numerics = "auto"
    max_batch_size: int = 64
    kv_memory: int | None = None
    tensor_parallel: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the command line would refuse."""
        choices = (("device", DeviceChoice), ("comm", CommChoice), ("numerics", Numerics))
        for name, allowed in choices:
            if getattr(self, name) not in get_args(allowed):
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(get_args(allowed))}")
        for name in ("max_batch_size", "kv_memory", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} is {value!r}: it must be a whole number of at least 1")
