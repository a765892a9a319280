"""Fixtures of all tiers."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, SmolLM2-135M-Instruct in GGUF form."""
    named = os.environ.get("MPI_TP_DEMO_GGUF")
    found = [Path(named)] if named else sorted((Path(__file__).parents[1] / "demo").glob("*.gguf"))
    if not found:
        pytest.skip("demo model not downloaded: bash run.sh")
    return found[0]
