"""The benchmarks as a user starts them, on a tiny model: they end well and say what the contract says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ENVIRONMENT, ROOT, MpiRun
from tests.support.sets import make_sets, save_checkpoint
from tests.support.tiny import TINY_CONFIGS

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
DECODE_COLUMNS = {
    "batch_size",
    "context",
    "ms_per_step",
    "median_ms",
    "tokens_per_s",
    "weight_gb_s",
    "copy_share",
    "comm_share",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(TINY_CONFIGS["qwen3"]))
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    return make_sets(save_checkpoint(folder / "model"), folder, 2, strategy="paired")[2]


def bench(mpirun: MpiRun, ranks: int, json_file: Path, *flags: str | Path | int) -> tuple[dict[str, Any], str]:
    """Return what `--json` got, and stdout after checking that its table has the results."""
    result = mpirun(ranks, "-m", "mpi_tp.bench", *map(str, flags), "--json", json_file, env=WITHOUT_GPU, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    written = json.loads(json_file.read_text())
    rows, meta = written["results"], written["meta"]
    title, _, header, _, *lines = result.stdout.splitlines()
    assert title.startswith(f"{flags[0]} ") or title.startswith(f"{flags[0]}:")
    assert [name.strip() for name in header.strip("|").split("|")] == [
        name for name in rows[0] if any(row[name] is not None for row in rows)
    ]
    assert len(lines) == len(rows)
    assert [rank["device"] for rank in meta["hardware"]] == ["cpu"] * ranks
    assert {"mpi-tp", "torch", "mpi4py", "python"} <= meta["versions"].keys()
    assert meta["command"] == flags[0]
    return written, result.stdout


def test_decode_of_a_shape_has_a_row_a_batch_size(mpirun: MpiRun, config: Path, tmp_path: Path) -> None:
    flags = ("--shape", config, "--batch-sizes", "1,3", "--context", 40, "--steps", 6, "--kv-memory", "8M")
    written, _ = bench(mpirun, 2, tmp_path / "x.json", "decode", *flags, "--strategy", "paired")
    rows = written["results"]
    assert [(row["batch_size"], row["context"]) for row in rows] == [(1, 40), (3, 40)]
    for row in rows:
        assert row.keys() == DECODE_COLUMNS
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch_size"] / row["ms_per_step"])
        assert 0 < row["comm_share"] < 1
        assert 0 < row["copy_share"] < 1
    settings = written["meta"]["settings"]
    assert settings["model"]["shape"]["config"]["hidden_size"] == 60
    assert (settings["model"]["strategy"], settings["model"]["dtype"]) == ("paired", "bfloat16")
    assert (settings["steps"], settings["kv_memory"]) == (6, 8 * 2**20)


def test_decode_of_a_shard_set_on_its_own(mpirun: MpiRun, tmp_path: Path) -> None:
    one = make_sets(save_checkpoint(tmp_path / "model"), tmp_path, 1)[1]
    flags = ("--shards", one, "--batch-sizes", "2", "--context", 30, "--steps", 4, "--kv-memory", "8M")
    written, _ = bench(mpirun, 1, tmp_path / "x.json", "decode", *flags)
    assert [row["comm_share"] for row in written["results"]] == [0.0]


def test_throughput_counts_every_token(mpirun: MpiRun, shards: Path, tmp_path: Path) -> None:
    flags = ("--shards", shards, "--requests", 7, "--input-len", "3:20", "--output-len", "5", "--max-batch-size", 3)
    picture = tmp_path / "x.png"
    written, _ = bench(mpirun, 2, tmp_path / "x.json", "throughput", *flags, "--kv-memory", "8M", "--plot", picture)
    [row] = written["results"]
    assert (row["requests"], row["output_tokens"]) == (7, 35)
    assert row["tokens_per_s"] == pytest.approx(35 / row["seconds"])
    assert 0 < row["first_token_p50_s"] <= row["first_token_p99_s"] < row["seconds"]
    assert 0 < row["between_tokens_p50_s"] <= row["between_tokens_p99_s"] < row["seconds"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_load_compares_with_a_raw_read(mpirun: MpiRun, shards: Path, tmp_path: Path) -> None:
    written, _ = bench(mpirun, 2, tmp_path / "x.json", "load", "--shards", shards, "--rounds", 3)
    rows = written["results"]
    assert [row["round"] for row in rows] == ["1", "2", "3", "median"]
    for row in rows[:3]:
        assert row["ratio"] == pytest.approx(row["load_gb_s"] / row["raw_gb_s"])


def test_comm_measures_round_sizes_and_the_models_own(mpirun: MpiRun, tmp_path: Path) -> None:
    written, _ = bench(mpirun, 3, tmp_path / "x.json", "comm", "--shape", "smollm2-135m", "--dtype", "float32")
    rows = written["results"]
    assert {row["operation"] for row in rows} == {"all_reduce", "all_gather", "broadcast", "send_recv"}
    sizes = [row["bytes"] for row in rows if row["operation"] == "broadcast"]
    assert (min(sizes), max(sizes)) == (2**10, 2**22)
    own = {(row["operation"], row["bytes"]) for row in rows if row["use"]}
    assert {("all_reduce", 4 * 576), ("all_gather", 4 * 1536), ("all_gather", 4 * 49152)} <= own
    assert all(row["mpi_us"] > 0 and row["nccl_us"] is None for row in rows)


def test_linear_has_a_row_a_variant(mpirun: MpiRun, tmp_path: Path) -> None:
    written, _ = bench(mpirun, 2, tmp_path / "x.json", "linear", "--hidden", 50, "--batch", 2, "--seq", 3)
    assert [row["variant"] for row in written["results"]] == ["mpi", "single device"]
    assert written["results"][1]["ratio_to_single"] == 1


def test_run_sh_starts_it(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(
        ["bash", ROOT / "run.sh", "bench", "linear", "--hidden", "16", "--json", tmp_path / "x.json"],
        env={**variables, **ENVIRONMENT, **WITHOUT_GPU, "VIRTUAL_ENV": sys.prefix, "NP": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads((tmp_path / "x.json").read_text())["meta"]["hardware"]) == 2


@pytest.mark.parametrize(
    ("ranks", "flags", "exit_code", "said"),
    [
        (2, ("decode", "--shape", "none"), 2, "'none' is no shape: choose from smollm2-135m"),
        (2, ("decode", "--shards", "nowhere"), 74, "nowhere/ holds no finished shard set"),
        (2, ("linear", "--hidden", "1"), 78, "--hidden 1 can be split over 1 ranks but mpirun started 2: use -np 1"),
        (1, ("comm",), 78, "there is 1: use mpirun -np 2"),
        (2, ("linear", "--json", "no/such/folder/x.json"), 74, "cannot write no/such/folder/x.json"),
    ],
)
def test_what_cannot_be_measured_is_told_once(
    mpirun: MpiRun, ranks: int, flags: tuple[str, ...], exit_code: int, said: str
) -> None:
    result = mpirun(ranks, "-m", "mpi_tp.bench", *flags, env=WITHOUT_GPU)
    assert result.returncode == exit_code
    assert result.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--context", 250, "--steps", 20), "tokens at batch size 1 and the model's context holds 256: lower them"),
        (("--context", 40, "--steps", 20, "--kv-memory", "20K"), "blocks of key/value cache and there are "),
        (("--context", 40, "--steps", 20, "--batch-sizes", "2048"), "2048 leaves a step of 2048 tokens no room"),
    ],
)
def test_what_does_not_fit_is_told_with_both_numbers(
    mpirun: MpiRun, config: Path, flags: tuple[str | int, ...], said: str
) -> None:
    batch = () if "--batch-sizes" in flags else ("--batch-sizes", "1")
    result = mpirun(1, "-m", "mpi_tp.bench", "decode", "--shape", config, *map(str, flags), *batch, env=WITHOUT_GPU)
    assert result.returncode == 78
    assert said in result.stderr
    assert "Traceback" not in result.stderr
