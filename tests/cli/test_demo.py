"""The demo model the whole way: GGUF, shards, mpirun, records; transformers' greedy tokens are the oracle.

`MPI_TP_EXHAUSTIVE=1` runs every rank count in every test, in one batch and one prompt at a time, which takes long.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "demo.jsonl").open(encoding="utf-8")]
NEW_TOKENS = 24
RANKS = (1, 2, 3, 4, 7)
EXHAUSTIVE = os.environ.get("MPI_TP_EXHAUSTIVE") == "1"
SOME_RANKS = RANKS if EXHAUSTIVE else (1, 7)


@pytest.fixture(scope="module")
def checkpoints(demo_gguf, tmp_path_factory):
    """The demo model as base.pt in float32 and in bfloat16, each with its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("demo")
    for dtype in ("float32", "bfloat16"):
        run_tool("sharder", demo_gguf, "--ranks", "1", "--dtype", dtype, "-o", folder / "set")
        (folder / dtype).mkdir()
        run_tool("sharder.merge", folder / "set", "-o", folder / dtype / "base.pt")
        shutil.rmtree(folder / "set")
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": golden["prompt"]}) + "\n" for golden in GOLDEN))
    return path


def run_tool(module, *arguments):
    result = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def infer(mpirun, shards, ranks, prompts, *flags):
    output = shards / "out.jsonl"
    result = mpirun(
        ranks,
        "-m",
        "mpi_tp.infer",
        *("--shards", shards, "--input", prompts, "--output", output, "--max-new-tokens", NEW_TOKENS, *flags),
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return output.read_bytes()


def records(output):
    return [json.loads(line) for line in output.splitlines()]


def assert_golden(output):
    for record, golden in zip(records(output), GOLDEN, strict=True):
        assert record["prompt_tokens"] == len(golden["prompt_token_ids"]), golden["prompt"]
        assert record["token_ids"] == golden["token_ids"], golden["prompt"]


@pytest.fixture(scope="module")
def single_rank_bytes():
    """What one rank wrote, by dtype: the bytes that every other rank count must write too."""
    return {}


@pytest.mark.parametrize("ranks", RANKS)
def test_float32_column_wise_equals_transformers_and_itself(
    mpirun, checkpoints, prompts, ranks, single_rank_bytes, tmp_path
):
    run_tool("sharder", checkpoints / "float32" / "base.pt", "--ranks", ranks, "-o", tmp_path / "set")
    output = infer(mpirun, tmp_path / "set", ranks, prompts, "--logprobs")
    assert_golden(output)
    assert output == single_rank_bytes.setdefault("float32", output)
    if EXHAUSTIVE or ranks == 3:
        assert infer(mpirun, tmp_path / "set", ranks, prompts, "--logprobs", "--max-batch-size", 1) == output
    shutil.rmtree(tmp_path / "set")


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_float32_paired_equals_transformers(mpirun, checkpoints, prompts, ranks, tmp_path):
    source = checkpoints / "float32" / "base.pt"
    run_tool("sharder", source, "--ranks", ranks, "--strategy", "paired", "-o", tmp_path / "set")
    assert_golden(infer(mpirun, tmp_path / "set", ranks, prompts))
    if EXHAUSTIVE:
        assert_golden(infer(mpirun, tmp_path / "set", ranks, prompts, "--max-batch-size", 1))
    shutil.rmtree(tmp_path / "set")


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_bfloat16_column_wise_equals_itself(mpirun, checkpoints, prompts, ranks, single_rank_bytes, tmp_path):
    run_tool("sharder", checkpoints / "bfloat16" / "base.pt", "--ranks", ranks, "-o", tmp_path / "set")
    output = infer(mpirun, tmp_path / "set", ranks, prompts, "--logprobs")
    assert output == single_rank_bytes.setdefault("bfloat16", output)
    if EXHAUSTIVE or ranks == 7:
        assert infer(mpirun, tmp_path / "set", ranks, prompts, "--logprobs", "--max-batch-size", 5) == output
    shutil.rmtree(tmp_path / "set")
