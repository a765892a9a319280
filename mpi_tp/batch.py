"""A batch job on rank 0: input lines into the engine, outcomes into records, in input order."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mpi_tp.engine.engine import Engine, Outcome
from mpi_tp.engine.request import RequestError
from mpi_tp.line_feed import LineFeed
from mpi_tp.records import BadLine, InputLine, Line, error_record, record
from mpi_tp.records.lines import JsonObject


class RecordWriter(Protocol):
    """Where records go."""

    num_resumed: int
    """How many of the lines so far an earlier run has answered."""

    def write(self, index: int, record: JsonObject, line: Line) -> None:
        """Take the record of the line with this index; each once, in any order."""
        ...


@dataclass
class BatchFigures:
    """What a batch has done so far; seconds are counted from its start.

    Lines and records are counted with those of earlier runs, `num_resumed`; errors and tokens without.
    """

    num_lines: int = 0
    num_records: int = 0
    num_resumed: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None

    def summary(self, start_seconds: float) -> str:
        """Return the figures for people; `start_seconds` passed before the batch."""
        first = self.first_token_seconds
        resumed = f" ({self.num_resumed} from earlier runs)" if self.num_resumed else ""
        return (
            f"{self.num_lines} lines{resumed}, {self.num_errors} errors, {self.completion_tokens} tokens, "
            f"{self.completion_tokens / max(self.seconds, 1e-9):.1f} tokens/s; "
            f"first token after {'-' if first is None else f'{start_seconds + first:.2f} s'}"
        )


class Batch:
    """Keeps the engine supplied with lines and the writer with records until the input ends."""

    def __init__(self, engine: Engine, feed: LineFeed, writer: RecordWriter) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._feed = feed
        self._writer = writer
        self._in_flight: dict[int, InputLine] = {}
        self.figures = BatchFigures()

    def run(self, read_ahead: int, keep_alive_seconds: float, on_step: Callable[[BatchFigures], None]) -> None:
        """Serve all lines, with up to `read_ahead` sequences queued; `on_step` is called after each step.

        While rank 0 waits for input, the other ranks hear from it every `keep_alive_seconds`.
        """
        start = time.perf_counter()
        while True:
            self._submit_lines(read_ahead, keep_alive_seconds)
            self._count_resumed()
            if not self._engine.is_idle:
                outcomes = self._engine.step()
            elif self._feed.is_exhausted:
                break
            else:
                self._engine.keep_alive()
                outcomes = []
            self.figures.seconds = time.perf_counter() - start
            if self.figures.first_token_seconds is None and self._engine.num_sampled:
                self.figures.first_token_seconds = self.figures.seconds
            for outcome in outcomes:
                self._write_outcome(outcome)
            on_step(self.figures)

    def _submit_lines(self, read_ahead: int, patience: float) -> None:
        """Submit a few lines, so that a row of bad ones cannot hold up the step; wait for the first only."""
        wait_seconds = patience if self._engine.is_idle else 0.0
        for _ in range(read_ahead):
            if self._engine.num_waiting >= read_ahead:
                return
            indexed = self._feed.next_line(wait_seconds)
            if indexed is None:
                return
            self._submit(*indexed)
            wait_seconds = 0.0

    def _count_resumed(self) -> None:
        new = self._writer.num_resumed - self.figures.num_resumed
        self.figures.num_resumed += new
        self.figures.num_lines += new
        self.figures.num_records += new

    def _submit(self, index: int, line: Line) -> None:
        self.figures.num_lines += 1
        if isinstance(line, BadLine):
            self._write_error(index, line)
            return
        try:
            self._engine.submit(index, line.prompt, line.params)
        except RequestError as error:
            self._write_error(index, line.refused(error.type, str(error)))
        else:
            self._in_flight[index] = line

    def _write_outcome(self, outcome: Outcome) -> None:
        line = self._in_flight.pop(outcome.key)
        if outcome.error:
            self._write_error(outcome.key, line.refused(outcome.error.type, str(outcome.error)))
            return
        self.figures.prompt_tokens += outcome.prompt_tokens
        self.figures.completion_tokens += sum(len(completion.token_ids) for completion in outcome.completions)
        self._write(outcome.key, record(line, outcome.prompt_tokens, outcome.completions, self._token_text), line)

    def _write_error(self, index: int, line: BadLine) -> None:
        self.figures.num_errors += 1
        self._write(index, error_record(line), line)

    def _write(self, index: int, json_object: JsonObject, line: Line) -> None:
        self._writer.write(index, json_object, line)
        self.figures.num_records += 1

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token]) if self._tokenizer else f"token_id:{token}"
