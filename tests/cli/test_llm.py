"""A user's script with `LLM` under mpirun: every rank gets every outcome, and a fault on one rank ends all."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MpiRun
from tests.cli.test_launch import last_words
from tests.support.sets import make_sets, save_checkpoint

SCRIPT = """
import json, sys, time
from mpi_tp import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", max_batch_size=2)
params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3)
prompts = ["one", [1, 2, 3], [300], "four", "x" * 256]
first = llm.generate(prompts, params)
again = llm.generate(prompts[::-1], [SamplingParams(6, 1.0, seed=7 - at) for at in range(5)])
assert llm.generate([]) == []

def described(outcome):
    return [outcome.error.type] if outcome.error else [c.token_ids for c in outcome.completions]

assert [described(o) for o in first] == [described(o) for o in again[::-1]]
everyone = llm._job.world.allgather([described(o) for o in first])
assert all(each == everyone[0] for each in everyone)
if llm.rank == 0:
    print(json.dumps([described(o) for o in first]))
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("llm")
    return make_sets(save_checkpoint(folder / "model"), folder, 1, 2, 3)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_every_rank_gets_the_same_outcomes_at_any_rank_count(
    mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path
) -> None:
    script = write(tmp_path, SCRIPT)
    printed = set()
    for ranks in (1, 3):
        result = mpirun(ranks, script, sets[ranks])
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        printed.add(result.stdout)
    (line,) = printed
    kinds = [None, None, ["unknown_token"], None, ["prompt_too_long"]]
    for described, kind in zip(json.loads(line), kinds, strict=True):
        assert described == kind if kind else len(described[0]) == 6


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_exception_in_the_script_of_one_rank_ends_all(
    mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path, guilty: int
) -> None:
    script = write(
        tmp_path,
        "import sys\nfrom mpi_tp import LLM\nllm = LLM(sys.argv[1], device='cpu')\n"
        f"if llm.rank == {guilty}:\n    raise KeyError('mine')\n"
        "llm.generate(['one'])\nprint('never')\n",
    )
    result = mpirun(2, script, sets[2], timeout=40)
    assert result.returncode == 70
    (line,) = last_words(result.stderr)
    assert f"[rank {guilty}/2]" in line
    assert "KeyError: 'mine'" in line
    assert "in <module>" in result.stderr
    assert "never" not in result.stdout


def test_a_rank_may_come_late(mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path) -> None:
    """The stall timeout counts while prompts run, not while the script of one rank does something else."""
    script = write(
        tmp_path,
        "import sys, time\nfrom mpi_tp import LLM\n"
        "llm = LLM(sys.argv[1], device='cpu', numerics='fast', stall_timeout=3)\n"
        "if llm.rank == 0:\n    time.sleep(7)\n"
        "print(len(llm.generate(['one'])))\n",
    )
    result = mpirun(2, script, sets[2])
    assert (result.returncode, result.stdout) == (0, "1\n1\n"), result.stderr


def test_wrong_arguments_are_told_once_and_without_traceback(
    mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path
) -> None:
    script = write(
        tmp_path,
        "import sys\nfrom mpi_tp import LLM, SamplingParams\nllm = LLM(sys.argv[1], device='cpu')\n"
        "llm.generate(['one', 'two'], [SamplingParams()])\n",
    )
    result = mpirun(2, script, sets[2], timeout=40)
    assert result.returncode == 2
    (line,) = last_words(result.stderr)
    assert "2 prompts came with 1 sampling parameters" in line
    assert "Traceback" not in result.stderr


def test_the_wrong_number_of_ranks(mpirun: MpiRun, sets: dict[int, Path], tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nfrom mpi_tp import LLM\nLLM(sys.argv[1])\n")
    result = mpirun(2, script, sets[3], timeout=40)
    assert result.returncode == 78
    (line,) = last_words(result.stderr)
    assert "holds 3 ranks but mpirun started 2: use -np 3" in line
