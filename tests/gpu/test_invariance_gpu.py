"""The demo model writes the same bytes on any number of ranks, which may share one GPU; not to be started by mpirun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import MpiRun, mpirun  # noqa: F401
from tests.gpu.test_demo_gpu import GOLDEN

RANKS = (1, 2, 3, 4)
PROMPTS = [golden["prompt"] for golden in GOLDEN][:6]
FLAGS = ["--device", "cuda", "--share-gpu", "--numerics", "invariant", "--logprobs", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def shard_sets(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Sets in bfloat16 by number of ranks, made side by side."""
    folders = {ranks: tmp_path_factory.mktemp("sets") / str(ranks) for ranks in RANKS}
    options = ("--strategy", "column_wise", "--dtype", "bfloat16")
    processes = [
        subprocess.Popen([sys.executable, "-m", "sharder", demo_gguf, "--ranks", str(ranks), *options, "-o", folder])
        for ranks, folder in folders.items()
    ]
    assert [process.wait(100) for process in processes] == [0] * len(RANKS)
    return folders


@pytest.fixture(scope="module")
def written() -> list[bytes]:
    """What the first run wrote: the bytes that every other one must write too."""
    return []


@pytest.mark.parametrize("batch_size", [8, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_any_number_of_ranks_writes_the_same_bytes(
    ranks: int,
    batch_size: int,
    mpirun: MpiRun,  # noqa: F811
    shard_sets: dict[int, Path],
    written: list[bytes],
    tmp_path: Path,
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    # Lines of different lengths, one much longer than a unit of keys, and one sampled.
    lines = [{"prompt": prompt} for prompt in PROMPTS]
    lines += [{"prompt": " ".join(PROMPTS) * 3}, {"prompt": PROMPTS[0], "temperature": 1.0, "top_p": 0.9, "n": 2}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comm = "nccl" if batch_size > 1 else "mpi"
    files = ("--shards", shard_sets[ranks], "--input", prompts, "--output", output)
    flags = (*FLAGS, "--kv-memory", "256M", "--max-batch-size", str(batch_size), "--comm", comm)
    result = mpirun(ranks, "-m", "mpi_tp.infer", *files, *flags, timeout=100)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line).get("error") for line in output.read_text().splitlines()] == [None] * len(lines)
    written.append(output.read_bytes())
    assert written[-1] == written[0]
