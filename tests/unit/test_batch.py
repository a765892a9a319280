"""The batch loop on rank 0: lines in, records out, whatever comes when."""

import io
import itertools
import json
import threading
from collections.abc import Iterable, Iterator

import pytest

from mpi_tp.batch import Batch, BatchFigures
from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.block_pool import BlockPool
from mpi_tp.engine.engine import Engine
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.runner import StepOutput
from mpi_tp.engine.scheduler import Scheduler
from mpi_tp.engine.step import StepPlan
from mpi_tp.errors import FileError
from mpi_tp.line_feed import READ_AHEAD, LineFeed
from mpi_tp.records import BadLine, InputLine, Line, OrderedWriter
from tests.unit.test_engine_stop import ScriptedRunner

VOCABULARY = 10
READ_AHEAD_SEQUENCES = 4


def good(number: int, num_tokens: int = 2, prompt: list[int] | None = None, n: int = 1) -> InputLine:
    return InputLine(number, number, prompt or [1], SamplingParams(num_tokens, n=n))


def bad(number: int) -> BadLine:
    return BadLine(number, number, "invalid_json", "no JSON")


class CountingRunner(ScriptedRunner):
    """Always says token 3; keeps the number of tokens of each step."""

    def __init__(self) -> None:
        super().__init__([3] * 50, VOCABULARY)
        self.steps: list[int] = []

    def launch(self, plan: StepPlan) -> StepOutput:
        self.steps.append(len(plan.ids))
        output: StepOutput = super().launch(plan)
        return output


class Run:
    """A batch, with what it writes and the number of records after each step."""

    def __init__(self, lines: Iterable[Line], keep_alive_seconds: float = 0.01, batch_size: int = 2) -> None:
        self.runner = CountingRunner()
        engine = Engine(
            SingleCommunicator(),
            self.runner,
            Scheduler(BlockPool(20), batch_size),
            None,
            context_length=40,
            eos_token_ids=frozenset(),
            vocab_size=VOCABULARY,
        )
        self.stream = io.BytesIO()
        self.seen: list[int] = []
        self.batch = Batch(engine, LineFeed(enumerate(lines)), OrderedWriter(self.stream, None))
        self._keep_alive_seconds = keep_alive_seconds

    def to_the_end(self) -> list[dict[str, object]]:
        self.batch.run(READ_AHEAD_SEQUENCES, self._keep_alive_seconds, self._note)
        return self.records()

    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def _note(self, figures: BatchFigures) -> None:
        self.seen.append(figures.num_records)


def test_records_come_in_the_order_of_the_lines() -> None:
    """The first line takes the longest, and one that cannot be served stands between two that can."""
    run = Run([good(1, 20), good(2), bad(3), good(4, prompt=[1] * 40), good(5, n=3), good(6)])
    records = run.to_the_end()
    assert [record["id"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert ["error" in record for record in records] == [False, False, True, True, False, False]
    figures = run.batch.figures
    assert (figures.num_lines, figures.num_records, figures.num_errors) == (6, 6, 2)
    assert figures.completion_tokens == 20 + 2 + 3 * 2 + 2
    assert figures.prompt_tokens == 4
    assert figures.first_token_seconds is not None
    assert run.seen == sorted(run.seen)


def test_no_lines_are_no_records() -> None:
    run = Run([])
    assert run.to_the_end() == []
    assert "first token after -" in run.batch.figures.summary(1.0)


def test_lines_are_served_while_later_ones_have_not_come() -> None:
    come = threading.Event()

    def lines() -> Iterator[Line]:
        yield good(1)
        assert come.wait(10)
        yield good(2)

    run = Run(lines())
    thread = threading.Thread(target=run.to_the_end)
    thread.start()
    wait_until(lambda: len(run.records()) == 1)
    kept_alive = run.runner.steps.count(0)
    wait_until(lambda: run.runner.steps.count(0) > kept_alive + 3)  # all ranks hear that rank 0 waits
    come.set()
    thread.join(10)
    assert [record["id"] for record in run.records()] == [1, 2]


def wait_until(condition) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("waited for 10 s")


def test_a_row_of_bad_lines_does_not_hold_up_the_steps() -> None:
    run = Run([good(1, 30), *(bad(number) for number in range(2, 2000)), good(2000)], batch_size=1)
    assert len(run.to_the_end()) == 2000
    assert len(run.runner.steps) > 1990 / READ_AHEAD_SEQUENCES
    assert max(after - before for before, after in itertools.pairwise(run.seen)) <= READ_AHEAD_SEQUENCES + 1


def test_input_is_read_no_further_ahead_than_said() -> None:
    given = []

    def lines() -> Iterator[Line]:
        for number in range(1, 2 * READ_AHEAD + 100):
            given.append(number)
            yield good(number)

    run = Run(lines())
    run.batch._submit_lines(READ_AHEAD_SEQUENCES, 5.0)
    wait_until(lambda: len(given) >= READ_AHEAD)
    assert run.batch.figures.num_lines <= READ_AHEAD_SEQUENCES
    assert len(given) <= READ_AHEAD + READ_AHEAD_SEQUENCES + 1


def test_an_input_that_breaks_off_is_an_error_after_what_came() -> None:
    def lines() -> Iterator[Line]:
        yield good(1)
        raise FileError("cannot read in.jsonl after line 1: it broke")

    run = Run(lines())
    with pytest.raises(FileError, match="after line 1"):
        run.to_the_end()


def test_a_feed_says_when_it_is_empty_and_when_it_has_ended() -> None:
    come = threading.Event()

    def lines() -> Iterator[Line]:
        assert come.wait(10)
        yield bad(1)

    feed = LineFeed(enumerate(lines()))
    assert feed.next_line(0) is None
    assert feed.next_line(0.01) is None
    assert not feed.is_exhausted
    come.set()
    assert feed.next_line(10) == (0, bad(1))
    assert feed.next_line(10) is None
    assert feed.is_exhausted
    assert feed.next_line(10) is None
