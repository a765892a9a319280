"""`infer --numerics invariant` on a GPU: the same bytes at any rank count, batch size and cache size.

The ranks share one GPU if need be; the model has nine query heads and three key/value heads, and random weights.
"""

import json
import subprocess
import sys

import pytest
import torch

from mpi_tp.models.families import tensor_table
from tests.cli.conftest import mpirun  # noqa: F401

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 5003,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
LENGTHS = (1, 15, 16, 17, 40, 130, 257, 300, 5, 64)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shard sets of one random bfloat16 model for 1 to 4 ranks, by rank count."""
    folder = tmp_path_factory.mktemp("sets")
    torch.manual_seed(0)
    weights = {row.name: (torch.randn(row.shape) * 0.05).bfloat16() for row in tensor_table(CONFIG)}
    torch.save({"model": weights, "config": CONFIG}, folder / "base.pt")
    for ranks in (1, 2, 3, 4):
        command = [sys.executable, "-m", "sharder", folder / "base.pt", "--ranks", ranks, "-o", folder / str(ranks)]
        subprocess.run([str(part) for part in command], check=True)
    return folder


@pytest.fixture(scope="module")
def prompts(shards):
    lines = []
    for number, length in enumerate(LENGTHS):
        ids = [(7 * number + 13 * i) % 5000 + 3 for i in range(length)]
        options = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 3 == 0 else {}
        lines.append(json.dumps({"prompt_token_ids": ids, **options}))
    path = shards / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_same_bytes_everywhere(mpirun, shards, prompts):  # noqa: F811
    def infer(ranks: int, *flags: str) -> bytes:
        output = shards / "out.jsonl"
        files = ("--shards", shards / str(ranks), "--input", prompts, "--output", output)
        numerics = ("--device", "cuda", "--share-gpu", "--numerics", "invariant", "--logprobs")
        result = mpirun(ranks, "-m", "mpi_tp.infer", *files, *numerics, "--max-new-tokens", 12, *flags, timeout=200)
        assert result.returncode == 0, result.stderr
        return output.read_bytes()

    whole = infer(1)
    assert len(whole.splitlines()) == len(LENGTHS)
    assert b"error" not in whole
    assert infer(1, "--max-batch-size", "1") == whole
    # 36 blocks of 16 tokens for a prompt of 300 and others: some must give way and come back.
    assert infer(1, "--kv-memory", str(37 * 16 * 2 * 4 * 3 * 64 * 2)) == whole
    for ranks in (2, 3, 4):
        assert infer(ranks) == whole
