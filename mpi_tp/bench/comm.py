"""Collectives by message size and at a model's own sizes: NCCL, eager and in a CUDA graph, against MPI via the host."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mpi_tp.bench.chart import Chart
from mpi_tp.bench.nccl_log import NcclLog
from mpi_tp.bench.report import Row
from mpi_tp.bench.timing import capture, seconds_per_call
from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.comm.nccl import NcclCommunicator
from mpi_tp.config import ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.partition.plan import Strategy
from mpi_tp.partition.ranges import block_range
from mpi_tp.session import Machine

CHART = Chart("bytes", ("nccl_us", "nccl_graph_us", "mpi_us"), series="operation", logarithmic=True)

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "send_recv")
SIZES = {"cuda": [2**power for power in range(10, 27, 2)], "cpu": [2**power for power in range(10, 23, 2)]}
"""Bytes of the whole message, by device."""
MODEL_TOKENS = (1, 32)
"""Tokens in a step whose messages are measured at the model's own sizes."""
GRAPH_CALLS = 20
"""Of one collective in a captured graph: its launch is shared by them, as by a step's."""


@dataclass(frozen=True)
class Message:
    """One thing to measure: `num_elements` of the joined tensor, and what it is for."""

    operation: str
    num_elements: int
    use: str


@contextmanager
def nccl_log(rank: int) -> Iterator[NcclLog | None]:
    """Keep NCCL's log, on rank 0, where it says what it picks; around everything that calls NCCL."""
    if rank:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield NcclLog(Path(folder) / "nccl.log")


def generic_messages(device: torch.device, dtype: torch.dtype) -> list[Message]:
    """Return every operation at every size."""
    sizes = SIZES[device.type]
    return [Message(name, size // dtype.itemsize, "") for name in OPERATIONS for size in sizes]


def model_messages(config: ModelConfig, strategy: Strategy) -> list[Message]:
    """Return what the ranks exchange in a step of the model, each size once, for some numbers of tokens."""
    heads = config.num_attention_heads * config.head_dim
    if strategy == "paired":
        features = [("all_reduce", config.hidden_size, "embedding, o_proj, down_proj")]
    else:
        features = [
            ("all_reduce", config.hidden_size, "embedding"),
            ("all_gather", heads, "attention heads"),
            ("all_gather", config.hidden_size, "o_proj, down_proj"),
            ("all_gather", config.intermediate_size, "act(gate) * up"),
        ]
    features.append(("all_gather", config.vocab_size, "logits"))
    return [
        Message(operation, tokens * size, f"{use}; {tokens} token(s)")
        for tokens in MODEL_TOKENS
        for operation, size, use in features
    ]


@torch.inference_mode()
def measure(machine: Machine, messages: list[Message], dtype: torch.dtype, log: NcclLog | None) -> list[Row]:
    """Return a row a message; collective. Raises ConfigurationError if there is but one rank."""
    if machine.comm.size == 1:
        raise ConfigurationError("bench comm measures messages between ranks, and there is 1: use mpirun -np 2")
    host = MpiCommunicator(machine.job.world.Dup())
    with machine.job.phase("measuring"):
        return [_measure_message(machine, host, message, dtype, log) for message in messages]


def _measure_message(
    machine: Machine, host: MpiCommunicator, message: Message, dtype: torch.dtype, log: NcclLog | None
) -> Row:
    nccl_us = graph_us = algorithm = None
    if isinstance(machine.comm, NcclCommunicator):
        call = _operation(machine.comm, message, dtype, machine.device)
        nccl_us = _microseconds(call, machine, message)
        graph = capture(call, machine.device, GRAPH_CALLS)
        graph_us = _microseconds(graph, machine, message) / GRAPH_CALLS
        algorithm = (log and log.newest_choice()) or "unknown"
        if message.operation == "send_recv":
            algorithm = "none"
    mpi_us = _microseconds(_operation(host, message, dtype, machine.device), machine, message)
    return {
        "operation": message.operation,
        "bytes": message.num_elements * dtype.itemsize,
        "use": message.use or None,
        "nccl_us": nccl_us,
        "nccl_graph_us": graph_us,
        "mpi_us": mpi_us,
        "mpi_to_nccl": graph_us and mpi_us / graph_us,
        "algorithm": algorithm,
    }


def _microseconds(call: Callable[[], object], machine: Machine, message: Message) -> float:
    """Return the time of one message; of a send and its echo, half."""
    seconds = seconds_per_call(call, machine)
    return seconds * 1e6 / (2 if message.operation == "send_recv" else 1)


def _operation(comm: Communicator, message: Message, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    tensor = torch.zeros(message.num_elements, dtype=dtype, device=device)
    if message.operation == "all_reduce":
        return lambda: comm.all_reduce(tensor)
    if message.operation == "broadcast":
        return lambda: comm.broadcast(tensor)
    if message.operation == "send_recv":
        return lambda: _echo(comm, tensor)
    spans = [block_range(message.num_elements, comm.size, rank) for rank in range(comm.size)]
    sizes = [stop - start for start, stop in spans]
    part = tensor[slice(*spans[comm.rank])].clone()
    return lambda: comm.all_gather(part, sizes)


def _echo(comm: Communicator, tensor: torch.Tensor) -> None:
    """Send from rank 0 to rank 1 and back."""
    if comm.rank == 0:
        comm.send(tensor, 1)
        comm.recv(tensor, 1)
    elif comm.rank == 1:
        comm.recv(tensor, 0)
        comm.send(tensor, 0)
    else:
        tensor.zero_()  # a graph cannot be empty
