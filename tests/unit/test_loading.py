"""From shard files to a model on every rank."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpi_tp.comm.threads import run_ranks
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.kernels import select
from mpi_tp.loading import load_model
from mpi_tp.memory import fitting
from mpi_tp.models.families import tensor_table
from mpi_tp.models.mlp import mlp_config
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.partition.plan import TensorRow, plan_shards
from mpi_tp.partition.ranges import Blocks
from mpi_tp.shards.reader import ShardSet
from tests.support.parallel import CPU
from tests.support.shards import flip, set_options, write_set

SHAPES = {"0.weight": (30, 20), "0.bias": (30,), "2.weight": (9, 30), "2.bias": (9,)}
CONFIG = mlp_config(SHAPES, "relu")


def random_weights(bias_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return {name: tensor.to(bias_dtype) if name.endswith("bias") else tensor for name, tensor in weights.items()}


def write(directory: Path, weights: dict[str, torch.Tensor], ranks: int) -> ShardSet:
    plan = plan_shards(tensor_table(CONFIG), "paired", ranks)
    write_set(directory, weights, plan, set_options(ranks, "paired", CONFIG))
    return ShardSet.open(directory)


@pytest.fixture(params=[1, 3])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads a rank has; with more than one, tensors are read ahead."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
def test_each_rank_loads_its_part(tmp_path: Path, bias_dtype: torch.dtype, numerics: str, torch_threads: int) -> None:
    """A bias may be stored wider than the matrices are."""
    weights = random_weights(bias_dtype)
    shards = write(tmp_path / "set", weights, 3)
    kernels = select(CPU, numerics, torch.float32)
    x = torch.randn(4, 20)

    def run(comm):
        steps = []
        with shards.open_rank(comm.rank) as rank_file:
            model, figures = load_model(shards, rank_file, comm, kernels, CPU, lambda: steps.append(1))
        assert isinstance(model, MLPStack)
        return model(x), figures.num_bytes, len(steps)

    hidden = torch.relu(x @ weights["0.weight"].T + weights["0.bias"].float())
    expected = hidden @ weights["2.weight"].T + weights["2.bias"].float()
    results = run_ranks(3, run)
    for y, _, steps in results:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        assert steps == len(SHAPES)
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert sum(num_bytes for _, num_bytes, _ in results) == whole + 2 * weights["2.bias"].nbytes


@pytest.mark.parametrize("name", SHAPES)
def test_damage_anywhere_is_told_with_tensor_rank_and_file(tmp_path: Path, name: str, torch_threads: int) -> None:
    shards = write(tmp_path, random_weights(), 2)
    kernels = select(CPU, "fast", torch.float32)
    with shards.open_rank(1) as rank_file:
        part = rank_file.tensors[name]
    flip(rank_file.path, part.offset + part.num_bytes // 2)

    def run(comm):
        with shards.open_rank(comm.rank) as rank_file:
            load_model(shards, rank_file, comm, kernels, CPU, lambda: None)

    with pytest.raises(FileError, match=rf"rank-00001-of-00002\.h5: tensor {name} of rank 1 is damaged"):
        run_ranks(2, run)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensor reader")]


def test_a_set_that_is_split_in_another_way_is_refused(tmp_path: Path) -> None:
    rows = [row for row in tensor_table(CONFIG) if row.name != "0.weight"]
    rows.append(TensorRow("0.weight", (30, 20), (1, Blocks(20)), (1, Blocks(20))))
    write_set(tmp_path, random_weights(), plan_shards(rows, "paired", 2), set_options(2, "paired", CONFIG))
    shards = ShardSet.open(tmp_path)
    kernels = select(CPU, "fast", torch.float32)
    with pytest.raises(ConfigurationError, match=r"splits 0\.weight as .*shard again with .* --ranks 2"):
        run_ranks(2, lambda comm: load_model(shards, shards.open_rank(comm.rank), comm, kernels, CPU, lambda: None))


def test_memory_that_is_not_there_is_told_with_advice() -> None:
    refused = pytest.raises(ConfigurationError, match="the cache does not fit in memory: take less")
    with refused, fitting("the cache", "take less"):
        torch.empty(2**60, dtype=torch.uint8)
    with refused, fitting("the cache", "take less"):
        torch.empty(10**30, 64)
    with pytest.raises(RuntimeError, match="must match"), fitting("the cache", "take less"):
        torch.zeros(2) + torch.zeros(3)
