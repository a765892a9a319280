"""The sharder as a user starts it: exit codes, messages of one line, kills, signals and full disks."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mpi_tp.models.families import tensor_table
from sharder import Sharder
from tests.support.engines import save_tokenizer
from tests.support.forked import run_module
from tests.support.shards import contents, write_small
from tests.support.tiny import AWKWARD

ROOT = Path(__file__).parents[2]
CONFIG = {"model_type": "llama", **AWKWARD}

# Stops for good after the first tensor, so that a test can strike while a set is half written.
HANGING = """
import sys, time
import sharder.__main__, sharder.program
from mpi_tp.shards.writer import ShardSetWriter

add = ShardSetWriter.add

def add_and_wait(*arguments):
    add(*arguments)
    print("half", flush=True)
    time.sleep(600)

ShardSetWriter.add = add_and_wait
sys.exit(sharder.program.run_program(sharder.__main__.main))
"""

SIGNAL_IN_CLEAN_UP = """
import os, shutil, signal, sys
import sharder.__main__, sharder.program
from mpi_tp.shards.writer import ShardSetWriter

rmtree = shutil.rmtree

def rmtree_when_stopped(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    rmtree(*arguments, **options)

def add(*arguments):
    shutil.rmtree = rmtree_when_stopped
    os.kill(os.getpid(), signal.SIGTERM)

ShardSetWriter.add = add
sys.exit(sharder.program.run_program(sharder.__main__.main))
"""

BROKEN = """
import sys
import sharder.__main__, sharder.program
from mpi_tp.shards.writer import ShardSetWriter

ShardSetWriter.add = lambda *arguments: 1 / 0
sys.exit(sharder.program.run_program(sharder.__main__.main))
"""


def run(
    *arguments: str | Path, module: str = "sharder", prepare: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return run_module(module, arguments, prepare)


def check_failure(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """The exit code is right, and the last line on stderr, the only one, says what is wrong."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def random_tensors(config: dict[str, object]) -> dict[str, torch.Tensor]:
    return {row.name: torch.randn(row.shape) for row in tensor_table(config)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.pt"
    torch.save({"model": random_tensors(CONFIG), "config": CONFIG}, path)
    return path


def test_shard_again_verify_inspect_merge(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    first = run(base, "--ranks", 3, "-o", target)
    assert first.returncode == 0, first.stderr
    assert f"{target}/: 21 tensors" in first.stdout
    assert "MB/s" in first.stdout
    assert "balance 1." in first.stdout
    assert "warning: no tokenizer.json" in first.stderr
    again = run(base, "--ranks", 3, "-o", target)
    assert (again.returncode, again.stdout.count("already holds this set")) == (0, 1), again.stderr
    verified = run(target, "--source", base, module="sharder.verify")
    assert (verified.returncode, verified.stdout.count("is whole")) == (0, 1), verified.stderr
    inspected = run(target, module="sharder.inspect")
    assert (inspected.returncode, inspected.stdout.count("q_proj")) == (0, 2), inspected.stderr
    merged = run(target, "-o", tmp_path / "merged.pt", module="sharder.merge")
    assert (merged.returncode, (tmp_path / "merged.pt").exists()) == (0, True), merged.stderr


def test_flags_may_come_from_a_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text(f"ranks: 2\noutput: {tmp_path}/shards\nstrategy: paired\n")
    done = run(base, "--config", tmp_path / "flags.yaml")
    assert done.returncode == 0, done.stderr
    assert "2 ranks (paired)" in done.stdout


def test_help_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sharder", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "--verify-source" in done.stdout
    assert "torch" not in done.stderr


def test_wrong_numbers_of_ranks(base: Path, tmp_path: Path) -> None:
    check_failure(run(base, "--ranks", 0), 2, "the number of ranks is 0")
    check_failure(run(base, "--ranks", 6, "-o", tmp_path / "x"), 78, "over 5 ranks at most, not 6", "--ranks 5")


def test_wrong_sources(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    gpt = {**CONFIG, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    bad = {
        "missing.pt": (None, 74, "No such file or directory"),
        "text.pt": ("no checkpoint at all", 78, "is no checkpoint"),
        "gpt.pt": ({"model": tensors, "config": gpt}, 78, "GPT2LMHeadModel"),
        "unknown.pt": ({"model": {**tensors, "x.y": torch.ones(1)}, "config": CONFIG}, 78, "x.y"),
        "linear.pt": ({"0.weight": torch.ones(3, 3)}, 2, "--activation"),
    }
    for name, (content, code, message) in bad.items():
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content)
        elif content:
            torch.save(content, path)
        check_failure(run(path, "--ranks", 2, "-o", tmp_path / "shards"), code, message)
        assert not (tmp_path / "shards").exists()


def test_a_folder_that_is_taken_or_cannot_be_written(base: Path, tmp_path: Path) -> None:
    write_small(tmp_path / "taken")
    before = contents(tmp_path / "taken")
    check_failure(run(base, "--ranks", 2, "-o", tmp_path / "taken"), 78, "already holds another", "--overwrite")
    assert contents(tmp_path / "taken") == before
    check_failure(run(base, "--ranks", 2, "-o", base / "shards"), 74, "cannot write", "Not a directory")


def test_damage_is_code_74_and_a_usage_error_2(tmp_path: Path) -> None:
    write_small(tmp_path / "shards")
    (tmp_path / "shards" / "rank-00001-of-00002.h5").unlink()
    check_failure(run(tmp_path / "shards", module="sharder.verify"), 74, "rank-00001-of-00002.h5")
    check_failure(run(tmp_path / "shards", "-o", tmp_path / "x.bin", module="sharder.merge"), 2, "must end with")


def start(script: str, base: Path, target: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(base), "--ranks", "2", "-o", str(target), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def start_hanging(base: Path, target: Path, *flags: str) -> subprocess.Popen[str]:
    process = start(HANGING, base, target, *flags)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_what_was_written(base: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start_hanging(base, tmp_path / "shards")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert errors.splitlines()[-1] == f"stopped by {number.name}: run the same command again"
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_does_not_interrupt_the_clean_up(base: Path, tmp_path: Path) -> None:
    """The first one is answered by a clean-up that sends the second one itself."""
    process = start(SIGNAL_IN_CLEAN_UP, base, tmp_path / "shards")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()[-1]) == (75, "stopped by SIGTERM: run the same command again")
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_exception_is_an_internal_error(base: Path, tmp_path: Path) -> None:
    process = start(BROKEN, base, tmp_path / "shards")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert errors.startswith("Traceback")
    assert errors.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_readable_set_and_the_next_one_cleans_up(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    process = start_hanging(base, target)
    process.kill()
    process.communicate(timeout=60)
    check_failure(run(target, module="sharder.verify"), 74, "holds no finished shard set")
    done = run(base, "--ranks", 2, "-o", target)
    assert done.returncode == 0, done.stderr
    assert sorted(contents(target)) == ["manifest.json", "rank-00000-of-00002.h5", "rank-00001-of-00002.h5"]


def test_a_killed_run_leaves_the_old_set_alone(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    write_small(target)
    before = contents(target)
    process = start_hanging(base, target, "--overwrite")
    process.kill()
    process.communicate(timeout=60)
    assert {name: content for name, content in contents(target).items() if ".incomplete" not in name} == before


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_limit_on_the_file_size(base: Path, tmp_path: Path) -> None:
    write_small(tmp_path / "shards")
    before = contents(tmp_path)
    done = run(base, "--ranks", 2, "-o", tmp_path / "shards", "--overwrite", prepare=limit_file_size)
    check_failure(done, 74, f"cannot write {tmp_path}/shards/: File too large")
    assert contents(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(base: Path, tmp_path: Path, small_disk: Path) -> None:
    check_failure(
        run(base, "--ranks", 2, "-o", small_disk / "shards"),
        74,
        f"cannot write {small_disk}/shards/: No space left on device",
    )
    Sharder(base, 2, tmp_path / "shards").run()
    for name in ("base.pt", "base.safetensors"):
        done = run(tmp_path / "shards", "-o", small_disk / name, module="sharder.merge")
        check_failure(done, 74, f"cannot write {small_disk}/{name}: No space left on device")
    assert list(small_disk.iterdir()) == []


def test_a_source_from_a_folder_beside_its_config(tmp_path: Path) -> None:
    torch.save(random_tensors(CONFIG), tmp_path / "weights.bin")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(tmp_path)
    done = run(tmp_path / "weights.bin", "--ranks", 2, "-o", tmp_path / "shards")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "shards" / "tokenizer" / name).read_bytes() == (tmp_path / name).read_bytes()
