"""A Slurm of one node on the loopback interface: this machine's munged, slurmctld and slurmd, in a folder of their own.

Nothing outside the folder is read or written, so that a site's own Slurm, other test sessions and what an earlier one
has left do not meet it. Its times are those of a test: jobs start at once, and a requeued one waits seconds.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
DAEMONS_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # the PATH of many users lacks it
PATIENCE_SECONDS = 180.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until no credential of its last run holds: by default two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
# Neither systemd nor cgroups: a container has none.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return what `running_slurm` needs and this machine lacks."""
    return [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{DAEMONS_PATH}")]


class Slurm:
    """A running Slurm, through its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = {**own, "PATH": f"{own['PATH']}:{DAEMONS_PATH}", "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object, cwd: Path | None = None, **variables: str) -> str:
        """Run a command to its end, with `variables` added to the environment; return its standard output."""
        return subprocess.run(
            list(map(str, command)),
            env={**self.environment, **variables},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        ).stdout

    def submit(self, *arguments: object, cwd: Path, **variables: str) -> str:
        """Call sbatch; return the id of the job."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the fields that scontrol shows of a job. (Values are taken to have no spaces.)"""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for(self, job: str, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states; return its fields then."""
        wait_until(lambda: self.job(job)["JobState"] in states, f"job {job} is not {' or '.join(states)}")
        return self.job(job)


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Run the daemons, as root."""
    with ExitStack() as stack:
        # A path of its own, for that of a socket has to be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        slurm = Slurm(folder)
        _configure(folder)
        stack.callback(_kill_jobs, slurm)
        munge_files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        socket_flag = f"--socket={folder}/munge.socket"
        stack.enter_context(_daemon(slurm, "munged", "--foreground", "--force", socket_flag, *munge_files))
        wait_until((folder / "munge.socket").exists, f"munged does not start: see {folder}/munged.out")
        stack.enter_context(_daemon(slurm, "slurmctld", "-D", "-c"))
        stack.enter_context(_daemon(slurm, "slurmd", "-D", "-c"))
        wait_until(lambda: _is_up(slurm), f"Slurm does not start: {_logs(folder)}")
        yield slurm


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    """Raise `TimeoutError` with the complaint if the condition does not come true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.1)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)  # munge insists
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"controller_port": one.getsockname()[1], "node_port": other.getsockname()[1]}
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, **ports))
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))


@contextmanager
def _daemon(slurm: Slurm, name: str, *flags: str) -> Iterator[None]:
    """Run a daemon that ends with this process, even if that is killed."""
    with (slurm.folder / f"{name}.out").open("w") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", name, *flags],
            env=slurm.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _is_up(slurm: Slurm) -> bool:
    command = ["sinfo", "--noheader", "--format=%t"]
    result = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    return result.stdout.strip() == "idle"


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))


def _kill_jobs(slurm: Slurm) -> None:
    """Kill what still runs of the jobs: all that has the folder's configuration in its environment."""
    mark = f"SLURM_CONF={slurm.environment['SLURM_CONF']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
