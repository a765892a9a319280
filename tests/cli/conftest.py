"""Programs under mpirun, started as a user starts them, from a process that has no MPI itself."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Open MPI: more ranks than cores, and root, as in a container. MPICH needs and reads none of these.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait would take the cores from those that work
    "OMP_NUM_THREADS": "1",
    "HDF5_USE_FILE_LOCKING": "FALSE",
}


class MpiRun:
    """Starts `mpirun -np N python ARGUMENTS…`."""

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher
        version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True).stdout
        self.is_open_mpi = "Open MPI" in version
        self.stop_signal = signal.SIGUSR1 if self.is_open_mpi else signal.SIGTERM
        """What this launcher passes on to the ranks. (Open MPI's ends by SIGTERM, MPICH's by SIGUSR1.)"""

    def __call__(
        self, n: int, *arguments: str | Path, timeout: float = 60, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end. A run that exceeds `timeout` seconds is killed and fails the test with what it printed."""
        process = self.start(n, *arguments, env=env)
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{arguments} on {n} ranks did not end in {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, n: int, *arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start, and return at once."""
        return subprocess.Popen(
            [self._launcher, "-np", str(n), sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                **(env or {}),
            },
        )


@pytest.fixture(scope="session")
def mpirun() -> MpiRun:
    launcher = shutil.which("mpirun", path=f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}")
    if launcher is None:
        pytest.skip('there is no mpirun: load an MPI module, or pip install "mpi-tp[mpi]"')
    return MpiRun(launcher)
