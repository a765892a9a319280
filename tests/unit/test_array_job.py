"""A task of a Slurm job array serves its own lines and writes its own file."""

import gzip
from pathlib import Path

import pytest

from mpi_tp.array_job import Share, array_share, task_output
from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import UsageError
from mpi_tp.records import read_lines


def environ(**values: int) -> dict[str, str]:
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, Share(0, 1)),
        (environ(ID=0, COUNT=4, MIN=0, MAX=3, STEP=1), Share(0, 4)),
        (environ(ID=5, COUNT=4, MIN=3, MAX=6, STEP=1), Share(2, 4)),
        (environ(ID=16, COUNT=3, MIN=2, MAX=16, STEP=7), Share(2, 3)),
        (environ(ID=2, COUNT=4), Share(2, 4)),
        (environ(ID=7, COUNT=1, MIN=7, MAX=7, STEP=1), Share(0, 1)),
    ],
)
def test_ids_may_start_anywhere_and_go_in_steps(variables: dict[str, str], share: Share) -> None:
    assert array_share(variables) == share


@pytest.mark.parametrize("task", [1, 2, 5])
def test_an_array_with_gaps_is_refused_by_all_its_tasks(task: int) -> None:
    with pytest.raises(UsageError, match="3 tasks but not each id from 1 to 3 in steps of 1"):
        array_share(environ(ID=task, COUNT=3, MIN=1, MAX=5, STEP=1))


def test_each_task_has_its_own_output() -> None:
    task = environ(ID=2, COUNT=4)
    assert task_output(Path("out-%a.jsonl"), task) == Path("out-2.jsonl")
    assert task_output(Path("2/out.jsonl"), task) == Path("2/out.jsonl")
    for shared in ("out.jsonl", "out-2026.jsonl"):
        with pytest.raises(UsageError, match=r"all tasks of the job array would write it: name it like out-%a\.jsonl"):
            task_output(Path(shared), task)
    assert task_output(Path("out.jsonl"), environ(ID=2, COUNT=1)) == Path("out.jsonl")
    assert task_output(Path("out-%a.jsonl"), {}) == Path("out-%a.jsonl")


@pytest.mark.parametrize("limit", [None, 5, 100])
def test_the_tasks_share_the_lines_out_without_changing_them(tmp_path: Path, limit: int | None) -> None:
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"a\n\nb\nc\n\nd\ne\nf\ng\n"))
    whole = list(read_lines(path, SamplingParams(seed=5), limit=limit))
    shares = [
        list(read_lines(path, SamplingParams(seed=5), limit=limit, wanted=Share(index, 3).has)) for index in range(3)
    ]
    assert [share[:1] for share in shares] == [whole[:1], whole[1:2], whole[2:3]]
    assert [shares[index % 3][index // 3] for index in range(len(whole))] == whole
    assert sum(map(len, shares)) == len(whole) == (limit if limit == 5 else 7)
