"""run.sh: how it launches, what it makes of exit codes and signals.

Real programs where a rank takes part; a launcher that only tells how it was called where the launcher alone matters.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT
from tests.support.checkpoints import write_model_and_config
from tests.support.slurm import wait_until
from tests.support.tiny import tiny_model

RUN_SH = ROOT / "run.sh"
OPEN_MPI = "mpirun (Open MPI) 5.0.11"
MPICH = "HYDRA build details:"


def start(*arguments: object, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start run.sh, outside Slurm, in the environment of this Python unless VIRTUAL_ENV says otherwise."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_", "NP"))}
    return subprocess.Popen(
        ["bash", str(RUN_SH), *map(str, arguments)],
        cwd=cwd,
        env={**ours, "VIRTUAL_ENV": sys.prefix, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # Open MPI adds null bytes
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash cannot trap what it finds ignored
    )


def finish(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object, stdin: str = "", **variables: str) -> tuple[int, str, str]:
        return finish(start(*arguments, cwd=tmp_path, **variables), stdin)

    return run


# A site of fake commands


class Site:
    """An environment whose launchers are scripts of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "bin").mkdir()
        self.command("python", f'exec {sys.executable} "$@"')

    def command(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def mpirun(self, version: str, exit_code: int = 0) -> None:
        """One that tells how it was called and with how many threads."""
        self.command(
            "mpirun",
            f'[[ $1 == --version ]] && echo "{version}" && exit\n'
            f'echo "$@" with $OMP_NUM_THREADS $HDF5_USE_FILE_LOCKING\nexit {exit_code}',
        )

    def slurm(self, job: str, restarts: int = 0) -> dict[str, str]:
        """A job whose site has no srun that fits; what scontrol is asked to do goes to `log`."""
        self.command("srun", "echo none")
        self.command("scontrol", f'echo "${{@: -2}}" >>{self.log}\necho "{job}"')
        return {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "3",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_RESTART_COUNT": str(restarts),
        }


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "site").mkdir()
    return Site(tmp_path / "site")


def test_open_mpi_may_use_all_cores_for_any_number_of_ranks(run, site):
    site.mpirun(OPEN_MPI)
    code, out, _ = run("infer", "--limit", "3", NP="5", VIRTUAL_ENV=str(site.folder))
    flags = (
        "--bind-to none --map-by slot:OVERSUBSCRIBE -x OMP_NUM_THREADS -x HDF5_USE_FILE_LOCKING -x MPI_TP_STATUS_DIR"
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 5)
    python = site.folder / "bin" / "python"
    assert (code, out) == (0, f"-np 5 {flags} {python} -m mpi_tp.infer --limit 3 with {threads} FALSE\n")


def test_mpich_needs_no_flags(run, site):
    site.mpirun(MPICH)
    _, out, _ = run("infer", NP="2", VIRTUAL_ENV=str(site.folder), OMP_NUM_THREADS="6")
    assert out == f"-np 2 {site.folder}/bin/python -m mpi_tp.infer with 6 FALSE\n"


@pytest.mark.parametrize("flags", [["--shards", "my set"], ["--shards=my set"], []])
def test_ranks_are_those_of_the_shard_set(run, site, tmp_path, flags):
    site.mpirun(MPICH)
    folder = tmp_path / ("my set" if flags else "shards")
    folder.mkdir()
    (folder / "manifest.json").write_text('{"ranks": 3}')
    _, out, _ = run("infer", *flags, VIRTUAL_ENV=str(site.folder))
    assert out.startswith("-np 3 ")


def test_ranks_are_one_without_a_shard_set(run, site):
    site.mpirun(MPICH)
    assert run("infer", VIRTUAL_ENV=str(site.folder))[1].startswith("-np 1 ")


def test_standard_input_arrives_as_a_file(run, site):
    site.command("mpirun", 'cat "${@: -1}"')
    prompts = "".join(f"prompt {number}\n" for number in range(20000))
    assert run("infer", "--input", "-", stdin=prompts, VIRTUAL_ENV=str(site.folder))[1] == prompts


@pytest.mark.parametrize(
    ("launcher", "contract"),
    [(code, code) for code in (0, 2, 70, 74, 75, 78)] + [(code, 75) for code in (9, 11, 137, 139, 143)] + [(1, 70)],
)
def test_exit_codes(run, site, launcher, contract):
    site.mpirun(OPEN_MPI, launcher)
    assert run("infer", VIRTUAL_ENV=str(site.folder))[0] == contract


RUNNING = (
    "JobId=7 JobName=mpi-tp JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 TimeLimit=01:00:00 "
    "Partition=long NumNodes=1 CPUs/Task=2 StdOut=/logs/7.out TresPerNode=gres:gpu:4 Account=(null)"
)
ONCE = RUNNING.replace("Requeue=1", "Requeue=0")


@pytest.mark.parametrize(
    ("job", "exit_code", "restarts", "asked"),
    [
        (RUNNING, 137, 0, "job 7 requeue 7"),
        (RUNNING, 137, 5, ""),
        (RUNNING, 78, 0, ""),
        (ONCE, 75, 0, "job 7 sbatch"),
        (RUNNING.replace("RUNNING", "CANCELLED"), 75, 0, "job 7"),
    ],
    ids=["stopped", "stopped-often", "failed", "not-requeueable", "cancelled"],
)
def test_slurm_starts_a_stopped_job_again(run, site, job, exit_code, restarts, asked):
    site.mpirun(OPEN_MPI, exit_code)
    site.command("sbatch", f"echo sbatch >>{site.log}")
    _, out, _ = run("infer", VIRTUAL_ENV=str(site.folder), **site.slurm(job, restarts))
    assert out.startswith("-np 3 ")
    assert (site.log.read_text().split() if site.log.exists() else []) == asked.split()


def test_a_job_that_finishes_records_is_started_again_for_ever(run, site, tmp_path):
    site.command("mpirun", f"echo record >>{tmp_path}/out.jsonl.journal; exit 75")
    run("infer", "--output", "out.jsonl", VIRTUAL_ENV=str(site.folder), **site.slurm(RUNNING, restarts=99))
    assert site.log.read_text().split() == ["job", "7", "requeue", "7"]


def test_a_job_that_may_not_be_requeued_is_submitted_again_with_its_resources(run, site):
    site.mpirun(OPEN_MPI, 75)
    site.command("sbatch", f'echo "$MPI_TP_RESTARTS" "$@" >{site.log}.sbatch')
    run("infer", "--limit", "3", VIRTUAL_ENV=str(site.folder), **site.slurm(ONCE))
    words = Path(f"{site.log}.sbatch").read_text().split()
    assert words[0] == "1"
    assert {
        "--ntasks=3",
        "--nodes=1",
        "--time=01:00:00",
        "--partition=long",
        "--gres=gpu:4",
        "--cpus-per-task=2",
    } < set(words)
    assert not any(word.startswith("--account") for word in words)
    assert words[-4:] == [str(RUN_SH), "infer", "--limit", "3"]


TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
"""That of the array whose own id is the array's, too."""


def test_of_an_array_only_the_stopped_task_is_requeued(run, site):
    site.mpirun(OPEN_MPI, 75)
    run("infer", VIRTUAL_ENV=str(site.folder), **TASK, **site.slurm(RUNNING))
    assert site.log.read_text().split() == ["job", "7_2", "requeue", "7_2"]


def test_a_task_of_an_array_is_submitted_again_with_its_share(run, site):
    site.mpirun(OPEN_MPI, 75)
    site.command("sbatch", f'env | grep ^SLURM_ARRAY >{site.log}.sbatch; echo "$@" >>{site.log}')
    run("infer", VIRTUAL_ENV=str(site.folder), **TASK, **site.slurm(ONCE))
    assert sorted(Path(f"{site.log}.sbatch").read_text().split()) == [
        "SLURM_ARRAY_TASK_COUNT=3",
        "SLURM_ARRAY_TASK_ID=2",
    ]
    assert "--dependency=afterany:7" in site.log.read_text()


def test_a_job_that_names_no_number_of_ranks_is_submitted_again_too(run, site):
    site.mpirun(OPEN_MPI, 75)
    site.command("sbatch", f'echo "$@" >>{site.log}')
    variables = site.slurm(ONCE.replace("TresPerNode=gres:gpu", "MinMemoryNode=16G TresPerJob=gres:gpu"))
    del variables["SLURM_NTASKS"]
    run("infer", NP="2", VIRTUAL_ENV=str(site.folder), **variables)
    words = site.log.read_text().split()
    assert {"--nodes=1", "--mem=16G", "--gpus=4"} < set(words)
    assert not any(word.startswith("--ntasks") for word in words)


def test_a_warning_that_comes_before_the_ranks_is_heeded(site, tmp_path):
    site.mpirun(OPEN_MPI)
    variables = site.slurm(RUNNING)
    site.command("srun", "touch asked; until [[ -f answer ]]; do sleep 0.1; done; echo none")
    process = start("infer", cwd=tmp_path, VIRTUAL_ENV=str(site.folder), **variables)
    wait_until((tmp_path / "asked").exists, "run.sh does not ask srun")
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "answer").touch()
    code, out, err = finish(process)
    assert (code, "mpi_tp.infer" in out) == (75, False)
    assert "job 7 is back in the queue" in err


@pytest.mark.parametrize(("restarts", "resumes"), [(0, False), (1, True)])
def test_a_job_that_starts_again_goes_on_with_its_journal(run, site, tmp_path, restarts, resumes):
    site.mpirun(OPEN_MPI)
    (tmp_path / "out-2.jsonl.journal").touch()
    flags = ["--output=out-%a.jsonl"]
    variables = {"SLURM_ARRAY_TASK_ID": "2", **site.slurm(RUNNING, restarts)}
    _, out, _ = run("infer", *flags, VIRTUAL_ENV=str(site.folder), **variables)
    assert ("--resume" in out) == resumes


def test_what_the_ranks_did_last_is_told(run, site):
    status = {"rank": 1, "host": "node7", "device": "cuda:1", "phase": "generating", "step": 12, "error": "boom"}
    site.command("mpirun", f"echo '{json.dumps(status)}' >$MPI_TP_STATUS_DIR/rank-00001.json; exit 70")
    code, _, err = run("infer", VIRTUAL_ENV=str(site.folder))
    assert code == 70
    assert err == "run.sh: rank 1 on node7, cuda:1: phase 'generating', step 12 - boom\n"


STARTS = "touch $MPI_TP_STATUS_DIR/rank-00000.json"


def test_an_srun_that_starts_no_rank_is_not_believed(run, site):
    site.mpirun(OPEN_MPI)
    variables = site.slurm(RUNNING)
    site.command("srun", 'case "$*" in *list) echo pmi2 pmix ;; *Abort*) exit 75 ;; *) echo srun ;; esac')
    code, out, err = run("infer", VIRTUAL_ENV=str(site.folder), **variables)
    assert (code, out.count("srun")) == (75, 3)
    assert "srun has started no rank (attempt 3)" in err


@pytest.mark.parametrize(("trial", "launcher"), [(75, "srun"), (70, "mpirun"), (137, "mpirun")])
def test_slurm_launches_with_srun_where_a_trial_of_it_ends_as_it_should(run, site, trial, launcher):
    site.mpirun(OPEN_MPI)
    variables = site.slurm(RUNNING)
    site.command(
        "srun", f'case "$*" in *list) echo pmi2 pmix ;; *Abort*) exit {trial} ;; *) {STARTS}; echo srun "$@" ;; esac'
    )
    code, out, _ = run("infer", VIRTUAL_ENV=str(site.folder), **variables)
    assert code == 0
    assert out.startswith("srun --ntasks=3 --mpi=pmi" if launcher == "srun" else "-np 3 ")
    assert ("--kill-on-bad-exit=1" in out) == (launcher == "srun")


# Wrong usage


def test_unknown_program_names_those_that_exist(run):
    code, _, err = run("infre")
    assert code == 2
    assert err.startswith("run.sh: there is no program infre: choose from infer")


def test_number_of_ranks_must_be_one(run):
    code, _, err = run("infer", NP="two")
    assert (code, err) == (2, "run.sh: NP=two is no number of ranks\n")


def test_srun_must_not_start_it_once_a_rank(run):
    code, _, err = run("infer", SLURM_STEP_NUM_TASKS="4")
    assert code == 2
    assert "sbatch" in err


# Real programs


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    source = write_model_and_config(tiny_model("llama"), folder)
    command = [sys.executable, "-m", "sharder", source, "--ranks", "2", "-o", folder / "set"]
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, capture_output=True)
    return folder / "set"


def test_infer_over_the_ranks_of_the_set(run, shards):
    line = json.dumps({"prompt_token_ids": [5, 6, 7]})
    code, out, err = run("infer", "--shards", shards, "--input", "-", "--max-new-tokens", 4, "--ignore-eos", stdin=line)
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 4


def test_exit_code_of_the_program(run, shards):
    code, _, err = run("infer", "--shards", shards, NP="1")
    assert code == 78
    assert "holds 2 ranks but mpirun started 1" in err


@pytest.fixture
def waiting(shards: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Infer on two ranks, of which the first waits for its input."""
    pipe = tmp_path / "prompts.jsonl"
    os.mkfifo(pipe)
    process = start("infer", "--shards", shards, "--input", pipe, cwd=tmp_path)
    with pipe.open("w"):  # opens when the rank does
        yield process
    process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_stop_signals_reach_the_ranks(waiting, number):
    waiting.send_signal(number)
    code, _, err = finish(waiting)
    assert code == 75, err
    assert "stopped by SIG" in err


def test_lost_rank_is_worth_another_try(waiting, tmp_path):
    os.kill(pid_of_a_rank(str(tmp_path)), signal.SIGKILL)
    assert finish(waiting)[0] == 75


def pid_of_a_rank(argument: str) -> int:
    """Return the process of one Python that infers with this argument."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().split(b"\0")
        if words[1:3] == [b"-m", b"mpi_tp.infer"] and any(argument.encode() in word for word in words):
            return int(entry.parent.name)
    raise AssertionError(f"no rank runs with {argument}")
