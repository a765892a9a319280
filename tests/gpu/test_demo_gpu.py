"""The demo model over NCCL and over host-staged MPI, ranks on one GPU or on several; not to be started by mpirun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import mpirun  # noqa: F401

GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "demo.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("comm", ["nccl", "mpi"])
@pytest.mark.parametrize("strategy", ["column_wise", "paired"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_float32_token_ids_equal_transformers(mpirun, demo_gguf, ranks, strategy, comm, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": golden["prompt"]}) + "\n" for golden in GOLDEN))
    options = ["--ranks", ranks, "--strategy", strategy, "--dtype", "float32", "-o", tmp_path / "set"]
    subprocess.run([sys.executable, "-m", "sharder", demo_gguf, *map(str, options)], check=True)
    output = tmp_path / "out.jsonl"
    flags = ["--input", prompts, "--output", output, "--max-new-tokens", 24, "--comm", comm, "--share-gpu"]
    result = mpirun(ranks, "-m", "mpi_tp.infer", "--shards", tmp_path / "set", "--device", "cuda", *flags, timeout=300)
    print(result.stderr)
    assert result.returncode == 0, result.stderr
    for line, golden in zip(output.read_text().splitlines(), GOLDEN, strict=True):
        assert json.loads(line)["token_ids"] == golden["token_ids"], golden["prompt"]
