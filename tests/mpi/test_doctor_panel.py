"""Questions to all ranks: answers come together, and who gives none is named."""

import io
import threading
from collections.abc import Callable

import pytest
from mpi4py import MPI

from mpi_tp.doctor import panel
from mpi_tp.doctor.panel import Check, Panel
from mpi_tp.doctor.rows import Report, Row, ok
from mpi_tp.errors import ConfigurationError, FileError

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
several_ranks = pytest.mark.skipif(WORLD.size == 1, reason="about a rank that others wait for")


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def doctors(lines: io.StringIO) -> Panel:
    return Panel(WORLD.Dup(), Report(lines))


def check(probe: Callable[[], int], seconds: float = 60.0) -> Check[int]:
    return Check("numbers", probe, lambda values: ok(f"they are {values}"), seconds)


def test_every_rank_gets_all_answers_and_the_same_row(doctors: Panel, lines: io.StringIO) -> None:
    for turn in range(3):
        expected = [rank + turn for rank in range(WORLD.size)]
        assert doctors.ask(check(lambda turn=turn: WORLD.rank + turn)) == expected  # type: ignore[misc]
        assert lines.getvalue().splitlines()[-1] == f"ok       numbers        they are {expected}"


def test_an_error_names_its_rank_and_the_next_question_is_asked(doctors: Panel, lines: io.StringIO) -> None:
    def probe() -> int:
        if WORLD.rank == LAST:
            raise FileError("no such file")
        return 1

    assert doctors.ask(check(probe)) is None
    name = "" if WORLD.size == 1 else f"rank {LAST}: "
    assert lines.getvalue() == f"failure  numbers        {name}no such file\n"
    assert doctors.ask(check(lambda: 2)) == [2] * WORLD.size


def test_an_error_that_all_have_is_told_once(doctors: Panel, lines: io.StringIO) -> None:
    def probe() -> int:
        raise FileError("no such file")

    assert doctors.ask(check(probe)) is None
    assert lines.getvalue() == "failure  numbers        no such file\n"


def test_a_judge_may_refuse(doctors: Panel, lines: io.StringIO) -> None:
    def judge(values: object) -> Row:
        raise ConfigurationError("they differ: make them equal")

    assert doctors.ask(Check("numbers", lambda: 1, judge)) == [1] * WORLD.size
    assert lines.getvalue() == "failure  numbers        they differ: make them equal\n"


def test_a_probe_that_hangs_ends_the_questions_on_all_ranks(doctors: Panel, lines: io.StringIO) -> None:
    released = threading.Event()
    hang = check(lambda: int(released.wait()) if WORLD.rank == LAST else 1, seconds=0.5)
    with pytest.raises(ConfigurationError, match=f"^rank {LAST} did not answer in time: no further checks were made$"):
        doctors.ask(hang)
    released.set()
    assert "no answer in 0.5 s, it hangs at threading.py" in lines.getvalue()
    assert lines.getvalue().endswith("1 of 1 checks failed\n")


@several_ranks
@pytest.mark.parametrize("silent", sorted({0, LAST}))
def test_a_silent_rank_is_named(
    doctors: Panel, lines: io.StringIO, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even come to the question, as a stopped process. Rank 0 names it; the others miss rank 0."""
    monkeypatch.setattr(panel, "_GRACE_SECONDS", 1.0)
    if WORLD.rank == silent:
        return
    named = silent if WORLD.rank == 0 else 0
    with pytest.raises(ConfigurationError, match=f"^rank {named} did not answer in time"):
        doctors.ask(check(lambda: 1, seconds=2.0))
    assert f"rank {named}: no answer in 2 s: look at the process" in lines.getvalue()
