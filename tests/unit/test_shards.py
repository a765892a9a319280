"""What the writer writes is what every reader reads, ours and h5py's own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from mpi_tp.errors import ConfigurationError
from mpi_tp.partition.plan import PlannedTensor
from mpi_tp.shards.dtypes import DTYPES, hdf5_type
from mpi_tp.shards.reader import ShardSet
from tests.support.checkpoints import bits_equal
from tests.support.parallel import slice_for
from tests.support.shards import (
    SPLIT,
    WHOLE,
    contents,
    set_options,
    small_plan,
    small_tensors,
    write_set,
    write_small,
)


def all_bit_patterns(dtype: torch.dtype) -> torch.Tensor:
    """A tensor [64, n] with every kind of value of the dtype, NaNs and subnormals too."""
    count = 256 if dtype.itemsize == 1 else 65536
    steps = torch.arange(count, dtype=torch.int64) * (2 ** (8 * dtype.itemsize) // count)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return steps.to(integers).view(dtype).reshape(64, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_values_of_all_dtypes_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = all_bit_patterns(dtype)
    planned = PlannedTensor("t", tuple(tensor.shape), 1, (((0, 3),), ((3, tensor.shape[1]),)))
    write_set(tmp_path, {"t": tensor}, {"t": planned}, set_options(2))
    shards = ShardSet.open(tmp_path)
    for rank in range(2):
        with shards.open_rank(rank) as file:
            assert bits_equal(file.read("t"), slice_for(planned, tensor, rank))


@pytest.mark.parametrize("dtype", DTYPES)
def test_h5py_alone_shows_the_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = all_bit_patterns(dtype)
    if dtype.is_floating_point:
        # HDF5's own conversion of 8-bit floats knows no finite values in the exponent of infinity.
        tensor = torch.where(tensor.double().abs() <= 240, tensor.double(), 1.0).to(dtype)
    write_set(tmp_path, {"t": tensor}, {"t": PlannedTensor("t", tuple(tensor.shape), None, ())}, set_options(1))
    with h5py.File(tmp_path / "rank-00000-of-00001.h5") as file:
        shown = file["t"][...]
        assert file["t"].attrs["torch_dtype"].decode() == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(shown.astype(np.float64), tensor.to(torch.float64).numpy())


def test_bfloat16_has_the_fields_that_its_definition_says() -> None:
    stored = hdf5_type(torch.bfloat16)
    assert stored.get_fields() == (15, 7, 8, 0, 7)
    assert (stored.get_ebias(), stored.get_size(), stored.get_precision()) == (127, 2, 16)


def test_attributes_describe_the_part(tmp_path: Path) -> None:
    manifest = write_small(tmp_path, ranks=2)
    with h5py.File(tmp_path / "rank-00001-of-00002.h5") as file:
        assert {k: v for k, v in file.attrs.items() if k in ("version", "rank", "ranks")} == {
            "version": 1,
            "rank": 1,
            "ranks": 2,
        }
        assert file.attrs["set_id"].decode() == manifest.set_id
        split, whole = dict(file[SPLIT].attrs), dict(file[WHOLE].attrs)
    assert split["global_shape"].tolist() == [65, 40]
    assert (split["axis"], split["ranges"].tolist()) == (0, [[48, 65]])
    assert (whole["axis"], whole["ranges"].tolist()) == (-1, [])


def test_large_datasets_are_aligned_small_ones_are_not_padded(tmp_path: Path) -> None:
    shapes = {"small": (10,), "large": (1024,), "larger": (1025,), "odd": (3,), "last": (5000,)}
    plan = {name: PlannedTensor(name, shape, None, ()) for name, shape in shapes.items()}
    write_set(tmp_path, {name: torch.ones(shape) for name, shape in shapes.items()}, plan, set_options(1))
    with ShardSet.open(tmp_path).open_rank(0) as file:
        assert all(file.tensors[name].offset % 4096 == 0 for name in ("large", "larger", "last"))
    assert (tmp_path / "rank-00000-of-00001.h5").stat().st_size < sum(np.prod(s) * 4 for s in shapes.values()) + 32768


def test_a_part_may_be_empty_and_a_tensor_a_scalar(tmp_path: Path) -> None:
    plan = {
        "few": PlannedTensor("few", (2, 5), 0, (((0, 1),), ((1, 2),), ())),
        "scalar": PlannedTensor("scalar", (), None, ()),
    }
    tensors = {"few": torch.arange(10.0).reshape(2, 5), "scalar": torch.tensor(3.5, dtype=torch.bfloat16)}
    write_set(tmp_path, tensors, plan, set_options(3))
    with ShardSet.open(tmp_path).open_rank(2) as file:
        assert file.read("few").shape == (0, 5)
        assert file.read("scalar").item() == 3.5


def test_several_ranges_follow_one_another(tmp_path: Path) -> None:
    planned = PlannedTensor("fused", (10, 6), 0, (((0, 2), (6, 8)), ((2, 6), (8, 10))))
    tensor = torch.arange(60).reshape(10, 6)
    write_set(tmp_path, {"fused": tensor}, {"fused": planned}, set_options(2))
    with ShardSet.open(tmp_path).open_rank(0) as file:
        assert torch.equal(file.read("fused"), tensor[[0, 1, 6, 7]])


def test_tensors_are_aligned_for_vector_loads(tmp_path: Path) -> None:
    write_small(tmp_path)
    with ShardSet.open(tmp_path).open_rank(0) as file:
        assert file.read(SPLIT).data_ptr() % 64 == 0


def test_the_same_content_gives_the_same_bytes_and_another_another_identity(tmp_path: Path) -> None:
    first = write_small(tmp_path / "a")
    write_small(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert write_small(tmp_path / "c", seed=1).set_id != first.set_id
    assert write_small(tmp_path / "d", ranks=3).set_id != first.set_id


def test_what_the_manifest_says_comes_back(tmp_path: Path) -> None:
    written = write_small(tmp_path, ranks=3)
    shards = ShardSet.open(tmp_path)
    assert shards.set_id == written.set_id
    assert (shards.ranks, shards.strategy, shards.config) == (3, "column_wise", {"model_type": "test"})
    assert shards.plan == small_plan(3)
    assert shards.manifest.tensors == written.tensors


def test_the_wrong_number_of_ranks_is_told_in_the_words_of_the_contract(tmp_path: Path) -> None:
    write_small(tmp_path / "shards", ranks=4)
    shards = ShardSet.open(tmp_path / "shards")
    shards.check_ranks(4)
    with pytest.raises(ConfigurationError) as failure:
        shards.check_ranks(2)
    expected = "shards/ holds 4 ranks but mpirun started 2: use -np 4, or python -m sharder SOURCE --ranks 2"
    assert str(failure.value) == f"{tmp_path}/{expected}"


def test_a_multiple_of_the_ranks_is_so_many_replicas(tmp_path: Path) -> None:
    write_small(tmp_path / "shards", ranks=4)
    shards = ShardSet.open(tmp_path / "shards")
    shards.check_ranks(8)
    shards.check_ranks(12, tensor_parallel=4)
    said = "holds 4 ranks but mpirun started 6: use -np 4 or a multiple of it, or python -m sharder SOURCE --ranks 6"
    with pytest.raises(ConfigurationError, match=said):
        shards.check_ranks(6)
    said = "holds 4 ranks but --tensor-parallel is 2: use --tensor-parallel 4, or python -m sharder SOURCE --ranks 2"
    with pytest.raises(ConfigurationError, match=said):
        shards.check_ranks(8, tensor_parallel=2)


def test_several_threads_may_read_one_file(tmp_path: Path) -> None:
    write_small(tmp_path)
    with ShardSet.open(tmp_path).open_rank(0) as file, ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(file.read, [SPLIT] * 32))
    assert all(torch.equal(part, small_tensors()[SPLIT][:48]) for part in parts)
