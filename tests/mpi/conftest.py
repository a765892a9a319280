"""Run as `mpirun -np N python -m pytest tests/mpi -x`, for N = 1, 2, 3, 4."""

from tests.support.mpi_session import (  # noqa: F401
    in_step,
    pytest_configure,
    pytest_report_header,
    pytest_runtest_makereport,
    shared_tmp_path,
)
