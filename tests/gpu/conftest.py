"""Run as `python -m pytest tests/gpu`, and as `mpirun -np N python -m pytest tests/gpu -x` on N GPUs or on one."""

from pathlib import Path

import pytest
import torch

from mpi_tp.devices import choose_device
from tests.support.mpi_session import (  # noqa: F401
    WORLD,
    in_step,
    pytest_configure,
    pytest_report_header,
    pytest_runtest_makereport,
    shared_tmp_path,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="no GPU is visible"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """This rank's GPU; another rank may have the same."""
    return choose_device(WORLD, "cuda", share_gpu=True)
