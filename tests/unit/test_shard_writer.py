"""A set comes whole or not at all: failures, signals and kills at any point of the writing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpi_tp.errors import ConfigurationError, FileError, StoppedError
from mpi_tp.shards.reader import ShardSet
from mpi_tp.shards.writer import ShardSetWriter
from tests.support.shards import SPLIT, contents, set_options, small_plan, small_tensors, write_small

STAGED = ".incomplete"


def write_until_failure(directory: Path, error: BaseException, overwrite: bool = False) -> None:
    with ShardSetWriter(directory, set_options(2), overwrite) as writer:
        writer.add(small_plan(2)[SPLIT], small_tensors()[SPLIT])
        raise error


@pytest.mark.parametrize("error", [StoppedError("SIGTERM"), KeyboardInterrupt(), OSError(28, "full")])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write_until_failure(tmp_path / "shards", error)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(type(error)):
        write_until_failure(tmp_path / "mine", error)
    assert contents(tmp_path) == {"mine/notes.txt": b"keep"}


def test_an_old_set_stays_until_the_new_one_is_finished(tmp_path: Path) -> None:
    old = write_small(tmp_path, ranks=3)
    before = contents(tmp_path)
    with pytest.raises(StoppedError):
        write_until_failure(tmp_path, StoppedError("SIGTERM"), overwrite=True)
    assert contents(tmp_path) == before
    with ShardSetWriter(tmp_path, set_options(2), overwrite=True) as writer:
        for name, planned in small_plan(2).items():
            writer.add(planned, small_tensors(seed=1)[name])
            assert ShardSet.open(tmp_path).set_id == old.set_id
        new = writer.commit()
    assert ShardSet.open(tmp_path).set_id == new.set_id
    assert sorted(contents(tmp_path)) == ["manifest.json", "rank-00000-of-00002.h5", "rank-00001-of-00002.h5"]


def test_another_set_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write_small(tmp_path, ranks=2)
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError, match=r"already holds another shard set .* --overwrite"):
        write_small(tmp_path, ranks=3)
    assert contents(tmp_path) == before


def test_rank_files_without_manifest_are_not_ours_to_delete(tmp_path: Path) -> None:
    (tmp_path / "rank-00000-of-00001.h5").write_text("somebody's")
    with pytest.raises(ConfigurationError, match=r"rank-00000-of-00001\.h5"):
        write_small(tmp_path)


def test_two_writers_do_not_meet_in_one_folder(tmp_path: Path) -> None:
    with ShardSetWriter(tmp_path, set_options(2)), pytest.raises(FileError, match="another sharder is writing"):
        write_small(tmp_path)
    write_small(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot write .*file/shards/: Not a directory"):
        write_small(tmp_path / "file" / "shards")


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    write_small(tmp_path)
    write_small(tmp_path, ranks=3, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize("step", range(5))
def test_a_signal_while_files_move_waits_until_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Two rank files and the manifest move; before, the old manifest and a stale rank file are deleted."""
    write_small(tmp_path, ranks=3)
    calls = 0
    rename = Path.rename

    def stopped_once(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == step // 2 + 1 and step % 2 == 0:
            raise StoppedError("SIGTERM")
        moved = rename(path, target)
        if calls == step // 2 + 1:
            raise StoppedError("SIGTERM")
        return moved

    with ShardSetWriter(tmp_path, set_options(2), overwrite=True) as writer:
        for name, planned in small_plan(2).items():
            writer.add(planned, small_tensors()[name])
        monkeypatch.setattr(Path, "rename", stopped_once)
        with pytest.raises(StoppedError):
            writer.commit()
    assert ShardSet.open(tmp_path).ranks == 2
    assert sorted(contents(tmp_path)) == ["manifest.json", "rank-00000-of-00002.h5", "rank-00001-of-00002.h5"]


KILLED_AT_MOVE = """
import os, sys
from pathlib import Path
from tests.support.shards import write_small

moves = int(sys.argv[2])
rename = Path.rename

def killed(path, target):
    global moves
    if moves == 0:
        os._exit(9)
    moves -= 1
    return rename(path, target)

Path.rename = killed
write_small(Path(sys.argv[1]), ranks=2, overwrite=True)
"""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_kill_while_files_move_leaves_no_set_and_the_next_run_mends_it(tmp_path: Path, moves: int) -> None:
    write_small(tmp_path, ranks=3)
    command = [sys.executable, "-c", KILLED_AT_MOVE, str(tmp_path), str(moves)]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert killed.returncode == 9
    with pytest.raises(FileError, match="holds no finished shard set"):
        ShardSet.open(tmp_path)
    write_small(tmp_path, ranks=2)
    assert ShardSet.open(tmp_path).ranks == 2
    assert not (tmp_path / STAGED).exists()


def test_leftovers_of_a_killed_run_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / STAGED).mkdir()
    (tmp_path / STAGED / "rank-00000-of-00009.h5").write_text("half")
    write_small(tmp_path)
    assert sorted(contents(tmp_path)) == ["manifest.json", "rank-00000-of-00002.h5", "rank-00001-of-00002.h5"]


def test_no_file_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    write_small(tmp_path)
    with pytest.raises(StoppedError):
        write_until_failure(tmp_path, StoppedError("SIGTERM"), overwrite=True)
    with ShardSet.open(tmp_path).open_rank(0) as file:
        file.read(SPLIT)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_parts_that_are_not_contiguous_in_the_source(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in small_tensors().items()}
    tensors[SPLIT] = tensors[SPLIT].T.contiguous().T
    with ShardSetWriter(tmp_path, set_options(2)) as writer:
        for name, planned in small_plan(2).items():
            writer.add(planned, tensors[name])
        writer.commit()
    with ShardSet.open(tmp_path).open_rank(1) as file:
        assert torch.equal(file.read(SPLIT), tensors[SPLIT][48:])
