"""From a shard file into a GPU's memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.errors import FileError
from mpi_tp.kernels import select
from mpi_tp.loading import load_model
from mpi_tp.models.families import tensor_table
from mpi_tp.models.mlp import mlp_config
from mpi_tp.partition.plan import PlannedTensor, plan_shards
from mpi_tp.shards import device_copy
from mpi_tp.shards.device_copy import DeviceReader
from mpi_tp.shards.dtypes import DTYPES
from mpi_tp.shards.read_ahead import ReadAhead
from mpi_tp.shards.reader import ShardSet
from tests.support.checkpoints import bits_equal
from tests.support.parallel import CPU
from tests.support.shards import flip, set_options, write_set

PIECE = 4096
BYTES = {"empty": 0, "one": 8, "piece": PIECE, "pieces": 3 * PIECE, "more": 2 * PIECE + 8, "many": 50 * PIECE + 16}
DELAY_CYCLES = 50_000_000  # some 30 ms of a GPU


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "STAGING_BYTES", PIECE)


def write(directory: Path, dtype: torch.dtype = torch.uint8) -> ShardSet:
    """A set for one rank whose tensors have BYTES random bytes each, and a scalar."""
    raw = {name: torch.randint(256, (size,), dtype=torch.uint8) for name, size in BYTES.items()}
    tensors = {name: data.view(dtype) for name, data in raw.items()}
    tensors["scalar"] = raw["one"].view(dtype)[0]
    plan = {name: PlannedTensor(name, tuple(tensor.shape), None, ()) for name, tensor in tensors.items()}
    write_set(directory, tensors, plan, set_options(1))
    return ShardSet.open(directory)


@pytest.mark.parametrize("num_readers", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_that_the_cpu_reads(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, num_readers: int
) -> None:
    with write(tmp_path, dtype).open_rank(0) as file:
        reader = DeviceReader(file, device, num_readers)
        with ReadAhead(file, device, reader.read_into, num_readers, 1 << 20) as tensors:
            for name in file.tensors:
                tensor = tensors.take(name)
                assert tensor.device == device
                assert bits_equal(tensor.cpu(), file.read(name)), name


def test_more_threads_than_buffers_take_turns(tmp_path: Path, device: torch.device) -> None:
    with write(tmp_path).open_rank(0) as file, ThreadPoolExecutor(8) as pool:
        reader = DeviceReader(file, device, 2)
        names = list(file.tensors) * 8
        tensors = [torch.empty(file.tensors[name].shape, dtype=torch.uint8, device=device) for name in names]
        list(pool.map(reader.read_into, names, tensors))
        for name, tensor in zip(names, tensors, strict=True):
            assert bits_equal(tensor.cpu(), file.read(name)), name


def test_memory_is_not_overwritten_before_queued_work_has_read_it(tmp_path: Path, device: torch.device) -> None:
    with write(tmp_path).open_rank(0) as file:
        reader = DeviceReader(file, device, 1)
        tensor = torch.ones(file.tensors["many"].shape, dtype=torch.uint8, device=device)
        torch.cuda._sleep(DELAY_CYCLES)
        copy = tensor.clone()
        reader.read_into("many", tensor)
        assert bits_equal(tensor.cpu(), file.read("many"))
        assert torch.all(copy == 1)


@pytest.mark.parametrize("name", ["one", "more", "many"])
def test_a_flipped_bit_is_told_when_its_tensor_is_taken(tmp_path: Path, device: torch.device, name: str) -> None:
    with write(tmp_path).open_rank(0) as file:
        flip(file.path, file.tensors[name].offset + file.tensors[name].num_bytes // 2)
        reader = DeviceReader(file, device, 2)
        with ReadAhead(file, device, reader.read_into, 2, 1 << 20) as tensors:
            for other in list(BYTES)[: list(BYTES).index(name)]:
                tensors.take(other)
            with pytest.raises(FileError, match=f"tensor {name} of rank 0 is damaged"):
                tensors.take(name)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensor reader")]


def test_a_model_is_loaded(tmp_path: Path, device: torch.device) -> None:
    """Biases that are stored wider than the matrices are cast."""
    shapes = {"0.weight": (300, 200), "0.bias": (300,), "2.weight": (90, 300), "2.bias": (90,)}
    weights = {name: torch.randn(shape, dtype=torch.float64) / 10 for name, shape in shapes.items()}
    stored = {name: tensor.float() if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    config = mlp_config(shapes, "relu")
    plan = plan_shards(tensor_table(config), "paired", 1)
    write_set(tmp_path, stored, plan, set_options(1, "paired", config))
    shards = ShardSet.open(tmp_path)
    x = torch.randn(4, 200)
    outputs, steps = [], []
    for place in (device, CPU):
        kernels = select(place, "fast", torch.float32)
        with shards.open_rank(0) as file:
            model, figures = load_model(shards, file, SingleCommunicator(), kernels, place, lambda: steps.append(1))
        outputs.append(model(x.to(place)).cpu())
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert len(steps) == 2 * len(shapes)
    assert figures.num_bytes == sum(tensor.nbytes for tensor in stored.values())
