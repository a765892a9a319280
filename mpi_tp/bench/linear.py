"""Two tensor-parallel linear layers, x · W1ᵀ split by output, then · W2ᵀ by input: what joining the ranks costs."""

from collections.abc import Callable

import torch

from mpi_tp.bench.chart import Chart
from mpi_tp.bench.random_model import check_ranks, random_context
from mpi_tp.bench.report import Row
from mpi_tp.bench.settings import LinearOptions
from mpi_tp.bench.timing import capture, seconds_per_call
from mpi_tp.comm.base import Communicator
from mpi_tp.comm.mpi import MpiCommunicator
from mpi_tp.comm.nccl import NcclCommunicator
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.memory import fitting
from mpi_tp.models.mlp import parse_mlp
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.session import Machine

CHART = Chart("variant", ("ms",))


@torch.inference_mode()
def measure(machine: Machine, settings: LinearOptions) -> list[Row]:
    """Return a row a variant; collective. Every rank runs the single device's one, on its own."""
    milliseconds = {}
    with machine.job.phase("measuring"):
        check_ranks(f"--hidden {settings.hidden}", settings.hidden, machine.comm.size)
        for name, call in _variants(machine, settings).items():
            milliseconds[name] = seconds_per_call(call, machine) * 1e3
    single, nccl = milliseconds["single device"], milliseconds.get("nccl")
    return [
        {"variant": name, "ms": ms, "ratio_to_single": ms / single, "ratio_to_nccl": nccl and ms / nccl}
        for name, ms in milliseconds.items()
    ]


def _variants(machine: Machine, settings: LinearOptions) -> dict[str, Callable[[], object]]:
    """Return one forward pass by the name of what joins the ranks."""
    variants: dict[str, Callable[[], object]] = {}
    if isinstance(machine.comm, NcclCommunicator):
        variants["nccl"] = _forward(machine, settings, machine.comm)
        variants["nccl, captured"] = capture(variants["nccl"], machine.device)
    if machine.comm.size > 1:
        variants["mpi"] = _forward(machine, settings, MpiCommunicator(machine.job.world.Dup()))
    variants["single device"] = _forward(machine, settings, SingleCommunicator())
    if machine.device.type == "cuda":
        variants["single device, captured"] = capture(variants["single device"], machine.device)
    return variants


def _forward(machine: Machine, settings: LinearOptions, comm: Communicator) -> Callable[[], object]:
    config = {
        "model_type": "mlp",
        "layer_names": ["0", "1"],
        "layer_sizes": [settings.hidden] * 3,
        "layer_biases": [False, False],
        "activation": "relu",
    }
    with fitting("what two layers need", "lower --batch, --seq or --hidden"):
        context = random_context(machine, comm, config, "paired", torch.float32, lambda _: None)
        stack = MLPStack(context, parse_mlp(config))
        x = torch.ones(settings.batch * settings.seq, settings.hidden, device=machine.device)
    return lambda: stack(x)
