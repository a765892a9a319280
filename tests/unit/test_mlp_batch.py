"""Files of rows, in and out."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.mlp_batch import open_rows_output, read_rows

ROWS = np.arange(12, dtype=np.float64).reshape(3, 4)


def save_npy(path: Path, rows: np.ndarray) -> Path:
    with path.open("wb") as file:
        np.save(file, rows)
    return path


def save_hdf5(path: Path, **datasets: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, rows in datasets.items():
            file[name.replace("__", "/")] = rows
    return path


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8])
def test_numbers_of_any_kind_are_read_as_float32(tmp_path: Path, dtype: type) -> None:
    for source in (
        save_npy(tmp_path / "x.npy", ROWS.astype(dtype)),
        save_hdf5(tmp_path / "x.h5", x=ROWS.astype(dtype)),
    ):
        rows = read_rows(source, 4, 0)
        assert rows.dtype == np.float32
        assert rows.tolist() == ROWS.tolist()


def test_a_dataset_is_named_after_the_file(tmp_path: Path) -> None:
    save_hdf5(tmp_path / "x.h5", a=ROWS, b__c=ROWS + 1)
    assert read_rows(Path(f"{tmp_path}/x.h5:b/c"), 4, 0)[0, 0] == 1
    assert read_rows(tmp_path / "x.h5", 4, 0)[0, 0] == 0  # the only one at the top
    save_hdf5(tmp_path / "two.h5", a=ROWS, b=ROWS)
    with pytest.raises(ConfigurationError, match=r"two.h5 holds the datasets a, b: name one as .*two.h5:DATASET"):
        read_rows(tmp_path / "two.h5", 4, 0)
    assert read_rows(save_npy(tmp_path / "x.h5.npy", ROWS), 4, 0).shape == (3, 4)


def test_without_a_file_the_rows_are_random_by_the_seed() -> None:
    first, again, other = read_rows(None, 4, 1), read_rows(None, 4, 1), read_rows(None, 4, 2)
    assert first.shape == (8, 4)
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("rows", [np.zeros((3, 5)), np.zeros(4), np.zeros((1, 3, 4))])
def test_rows_of_another_shape_are_refused(tmp_path: Path, rows: np.ndarray) -> None:
    with pytest.raises(ConfigurationError, match="the model takes rows of 4"):
        read_rows(save_npy(tmp_path / "x.npy", rows), 4, 0)


@pytest.mark.parametrize("rows", [np.zeros((3, 4), complex), np.zeros((3, 4), bool), np.full((3, 4), "a")])
def test_what_is_no_number_is_refused(tmp_path: Path, rows: np.ndarray) -> None:
    with pytest.raises(ConfigurationError, match="the model takes real numbers"):
        read_rows(save_npy(tmp_path / "x.npy", rows), 4, 0)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"text"])
@pytest.mark.parametrize("name", ["x.npy", "x.h5"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=f"cannot read .*{name}"):
        read_rows(tmp_path / name, 4, 0)


def test_files_with_objects_missing_files_and_missing_datasets_are_named(tmp_path: Path) -> None:
    save_npy(tmp_path / "objects.npy", np.array([[{}]], object))
    save_hdf5(tmp_path / "x.h5", a=ROWS)
    for source in (tmp_path / "objects.npy", tmp_path / "none.npy", tmp_path / "none.h5", Path(f"{tmp_path}/x.h5:b")):
        with pytest.raises(FileError, match="cannot read"):
            read_rows(source, 4, 0)


def test_standard_input_and_other_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.npy or \.h5"):
        read_rows("-", 4, 0)
    with pytest.raises(UsageError, match=r"y\.txt: .* \.npy or \.h5"), open_rows_output(tmp_path / "y.txt"):
        pass


@pytest.mark.parametrize("num_rows", [0, 3])
def test_rows_are_written(tmp_path: Path, num_rows: int, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    rows = ROWS[:num_rows].astype(np.float32) / 3
    for output in (tmp_path / "y.npy", tmp_path / "y.h5", None):
        with open_rows_output(output) as write:
            assert not output or not output.exists()
            write(rows)
    assert np.array_equal(np.load(tmp_path / "y.npy"), rows)
    with h5py.File(tmp_path / "y.h5") as file:
        assert np.array_equal(file["y"][...], rows)
    records = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert records == [{"id": at + 1, "output": row.tolist()} for at, row in enumerate(rows)]


def test_an_output_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(FileError, match=r"cannot write .*missing/y\.npy"),
        open_rows_output(tmp_path / "missing" / "y.npy"),
    ):
        pytest.fail("opened")
