"""Batch inference of a plain stack of linear layers: rows in, rows out."""

import json
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from sharder import Sharder
from tests.cli.conftest import MpiRun
from tests.cli.test_launch import last_words


@pytest.fixture(scope="module")
def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.GELU(), nn.Linear(50, 33), nn.GELU(), nn.Linear(33, 7))


@pytest.fixture(scope="module")
def sets(stack: nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set of two ranks for each strategy."""
    folder = tmp_path_factory.mktemp("rows")
    torch.save(stack.state_dict(), folder / "stack.pt")
    sets = {"column_wise": folder / "column_wise", "paired": folder / "paired"}
    Sharder(folder / "stack.pt", 2, sets["column_wise"], "column_wise", activation="gelu").run()
    Sharder(folder / "stack.pt", 2, sets["paired"], "paired", activation="gelu").run()
    return sets


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((11, 20))


def infer(mpirun: MpiRun, shards: Path, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    return mpirun(2, "-m", "mpi_tp.infer", "--shards", shards, "--device", "cpu", *flags)


def expected(stack: nn.Sequential, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return stack(torch.from_numpy(rows.astype(np.float32))).numpy()


def test_numpy_rows_to_a_numpy_file(
    mpirun: MpiRun, sets: dict[str, Path], stack: nn.Sequential, rows: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", rows)
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy")
    result = infer(mpirun, sets["paired"], *files, "--max-batch-size", "4")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected(stack, rows), rtol=1e-5, atol=1e-6)
    (line,) = result.stderr.splitlines()
    assert "mpi_tp: 11 rows, " in line
    assert "MB/s" in line
    facts = json.loads((tmp_path / "y.npy.meta.json").read_text())
    assert facts["figures"]["num_rows"] == 11
    assert len(facts["ranks"]) == 2


def test_hdf5_rows_to_an_hdf5_file(
    mpirun: MpiRun, sets: dict[str, Path], stack: nn.Sequential, rows: np.ndarray, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["inner/x"] = rows
        file["other"] = np.zeros(3)
    files = ("--input", f"{tmp_path}/x.h5:inner/x", "--output", tmp_path / "y.h5", "--limit", "5")
    result = infer(mpirun, sets["column_wise"], *files)
    assert result.returncode == 0, result.stderr
    with h5py.File(tmp_path / "y.h5") as file:
        np.testing.assert_allclose(file["y"][...], expected(stack, rows[:5]), rtol=1e-5, atol=1e-6)


def test_a_random_batch_to_standard_output(mpirun: MpiRun, sets: dict[str, Path], stack: nn.Sequential) -> None:
    result = infer(mpirun, sets["column_wise"], "--seed", "7")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["id"] for record in records] == list(range(1, 9))
    rows = np.random.default_rng(7).standard_normal((8, 20), np.float32)
    np.testing.assert_allclose([record["output"] for record in records], expected(stack, rows), rtol=1e-5, atol=1e-6)


def test_replicas_share_the_rows(mpirun: MpiRun, stack: nn.Sequential, rows: np.ndarray, tmp_path: Path) -> None:
    """Three batches for two replicas: the first and the last are the first one's."""
    torch.save(stack.state_dict(), tmp_path / "stack.pt")
    Sharder(tmp_path / "stack.pt", 1, tmp_path / "set", activation="gelu").run()
    np.save(tmp_path / "x.npy", rows)
    files = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy", "--max-batch-size", "4")
    result = infer(mpirun, tmp_path / "set", *files)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected(stack, rows), rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "y.npy.meta.json").read_text())["replicas"] == 2


def test_rows_of_the_wrong_width(mpirun: MpiRun, sets: dict[str, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 21)))
    result = infer(mpirun, sets["paired"], "--input", tmp_path / "x.npy")
    assert result.returncode == 78
    (line,) = last_words(result.stderr)
    assert f"{tmp_path}/x.npy has shape [3, 21]: the model takes rows of 20" in line
