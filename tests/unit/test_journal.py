"""The journal of a batch: what is in it survives any death, what is not whole is served again."""

import dataclasses
import fcntl
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpi_tp.engine.request import SamplingParams
from mpi_tp.errors import ConfigurationError, FileError, StoppedError
from mpi_tp.records import BadLine, InputLine, Line, LineKeys, ResumableWriter, journal, open_earlier, read_lines
from mpi_tp.records.journal import HEADER
from mpi_tp.records.sync import Syncer
from mpi_tp.records.tables import KeyTable, Span

KEYS = LineKeys({"model": "m"})


class Death(BaseException):
    """A job that ends in the middle."""


def record_of(line: Line) -> dict[str, object]:
    """Return a record from which one can tell which line it answers."""
    what = line.message if isinstance(line, BadLine) else [line.prompt, line.params.max_new_tokens]
    return {"id": line.id, "answer": what, "text": "é\n\ud800" if len(str(line.id)) % 2 else "\u2028"}


class Batch:
    """Runs over a file of lines, as a batch does, and counts what it has to serve."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out.jsonl"
        self.journal = folder / "out.jsonl.journal"
        self.input = folder / "in.jsonl"
        self.keys = KEYS
        self.sampling = SamplingParams()

    def write_input(self, *lines: dict[str, object] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("".join(text + "\n" for text in texts))

    def run(self, resume: bool = True, die_after: int | None = None, order: int = 1) -> list[int]:
        """Serve the lines, in groups of `order` backwards; return the numbers of those that were served."""
        served: list[int] = []
        with open_earlier(self.output, resume, lambda: None) as earlier:
            writer = ResumableWriter(earlier, self.keys)
            pending = list(writer.pending(read_lines(self.input, self.sampling)))
            for start in range(0, len(pending), order):
                for index, line in reversed(pending[start : start + order]):
                    if len(served) == die_after:
                        raise Death
                    writer.write(index, record_of(line), line)
                    served.append(line.number)
            if len(served) == die_after:
                raise Death
            writer.finish(lambda: None)
        assert not self.journal.exists()
        self.check()
        return served

    def die(self, after: int, resume: bool = True, order: int = 1) -> None:
        with pytest.raises(Death):
            self.run(resume, after, order)

    def check(self) -> None:
        expected = [json.loads(json.dumps(record_of(line))) for line in read_lines(self.input, self.sampling)]
        assert [json.loads(line) for line in self.output.read_text().split("\n")[:-1]] == expected


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    batch = Batch(tmp_path)
    batch.write_input(*({"prompt": f"p{number}"} for number in range(1, 11)))
    return batch


def test_a_batch_without_a_death_leaves_its_output_alone(batch: Batch) -> None:
    assert batch.run(resume=False) == list(range(1, 11))
    assert sorted(batch.output.parent.iterdir()) == [batch.input, batch.output]


@pytest.mark.parametrize("order", [1, 4, 10])
def test_every_line_is_served_once_whenever_the_job_dies(batch: Batch, order: int) -> None:
    batch.die(0, resume=False, order=order)
    batch.die(4, order=order)
    batch.die(3, order=order)
    assert not batch.output.exists()
    assert len(batch.run(order=order)) == 3


def test_the_bytes_are_those_of_a_run_without_a_death(batch: Batch) -> None:
    batch.run()
    whole = batch.output.read_bytes()
    batch.die(7, order=5)
    batch.run()
    assert batch.output.read_bytes() == whole


def test_records_are_in_the_file_at_once(batch: Batch) -> None:
    with open_earlier(batch.output, False, lambda: None) as earlier:
        writer = ResumableWriter(earlier, KEYS)
        pending = list(writer.pending(read_lines(batch.input, batch.sampling)))
        for count, (index, line) in enumerate(reversed(pending), 1):  # behind the first line, that takes longest
            writer.write(index, record_of(line), line)
            assert batch.journal.read_bytes().count(b"\n") == 1 + count
        assert not batch.output.exists()
        writer.finish(lambda: None)
    batch.check()


def test_a_journal_with_records_is_not_overwritten_unasked(batch: Batch) -> None:
    batch.die(0, resume=False)
    batch.die(2, resume=False)  # there was a journal, but without records
    before = batch.journal.read_bytes()
    with pytest.raises(ConfigurationError, match=r"out\.jsonl\.journal holds records .* --resume, or remove it"):
        batch.run(resume=False)
    assert batch.journal.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 2, 30, 100])
def test_a_torn_last_line_is_repaired(batch: Batch, cut: int) -> None:
    batch.die(5)
    os.truncate(batch.journal, batch.journal.stat().st_size - cut)
    batch.die(1)
    assert [json.loads(line)["line"] for line in batch.journal.read_text().split("\n")[1:-1]] == [1, 2, 3, 4, 5]
    assert batch.run() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("size", range(0, len(HEADER) + 1, 5))
def test_a_torn_first_line_is_repaired(batch: Batch, size: int) -> None:
    batch.journal.write_bytes(HEADER[:size])
    assert len(batch.run(resume=False)) == 10


def test_a_tail_of_zeros_is_cut_off(batch: Batch) -> None:
    """What a file system may leave of the last writes when the machine dies."""
    batch.die(5)
    with batch.journal.open("ab") as file:
        file.write(bytes(5000))
    assert batch.run() == [6, 7, 8, 9, 10]


def test_a_line_counts_only_if_every_byte_is_as_it_was_written(batch: Batch, capsys: pytest.CaptureFixture) -> None:
    batch.die(4)
    whole = batch.journal.read_bytes()
    start = whole.index(b'{"line": 3')
    for offset in range(start, whole.index(b'{"line": 4'), 7):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        batch.journal.write_bytes(damaged)
        served = batch.run()
        assert 3 in served, offset
        assert set(served) <= {3, 4, *range(5, 11)}, offset  # a line end more or less may take the next one along
        assert f"{batch.journal}: " in capsys.readouterr().err
    assert batch.output.exists()


def test_damaged_lines_are_told_in_one_line(batch: Batch, capsys: pytest.CaptureFixture) -> None:
    batch.die(6)
    lines = batch.journal.read_bytes().split(b"\n")
    lines[2] = lines[2][5:]
    lines[4] = b"\0" * 50
    batch.journal.write_bytes(b"\n".join(lines))
    assert batch.run() == [2, 4, 7, 8, 9, 10]
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 damaged lines, the first is line 3" in line


def test_a_damaged_header_loses_no_record(batch: Batch) -> None:
    batch.die(6)
    batch.journal.write_bytes(b"x" + batch.journal.read_bytes()[1:])
    assert batch.run() == [7, 8, 9, 10]


@pytest.mark.parametrize("resume", [False, True])
def test_another_file_of_that_name_is_left_alone(batch: Batch, resume: bool) -> None:
    batch.journal.write_text("Dear diary,\ntoday")
    with pytest.raises(FileError, match="no journal of a batch"):
        batch.run(resume)
    assert batch.journal.read_text() == "Dear diary,\ntoday"


def test_only_one_run_at_a_time(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 0.3)
    with (
        open_earlier(batch.output, False, lambda: None),
        pytest.raises(StoppedError, match="is locked: another run"),
        open_earlier(batch.output, True, lambda: None),
    ):
        pytest.fail("two runs have it")
    assert not batch.journal.exists()


def test_a_run_waits_for_the_end_of_the_one_before(batch: Batch) -> None:
    """Which removes its journal: the lock of a removed file is worth nothing."""
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with open_earlier(batch.output, False, lambda: None):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    threading.Timer(0.3, leave.set).start()
    with open_earlier(batch.output, False, lambda: None):
        assert batch.journal.exists()
        with batch.journal.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    thread.join()


def test_an_edited_line_is_served_again(batch: Batch) -> None:
    batch.write_input({"id": "a", "prompt": "1"}, {"id": "b", "prompt": "2"}, {"id": "c", "prompt": "3"})
    batch.die(2)
    batch.write_input({"id": "a", "prompt": "1"}, {"id": "b", "prompt": "2!"}, {"id": "c", "prompt": "3"})
    assert batch.run() == [2, 3]


def test_lines_may_move(batch: Batch) -> None:
    lines = [{"id": letter, "prompt": letter} for letter in "abcdef"]
    batch.write_input(*lines)
    batch.die(5)
    batch.write_input({"id": "new", "prompt": "n"}, "", *reversed(lines))
    assert batch.run() == [1, 3]  # the new one, and f, which was not served


def test_a_default_id_is_part_of_a_line(batch: Batch) -> None:
    batch.die(5)
    batch.write_input({"prompt": "p1"}, {"prompt": "new"}, *({"prompt": f"p{number}"} for number in range(2, 6)))
    assert batch.run() == [2, 3, 4, 5, 6]


def test_equal_ids_and_equal_lines(batch: Batch) -> None:
    twice = {"id": "a", "prompt": "1"}
    batch.write_input(twice, {"id": "a", "prompt": "2"}, twice, twice, "{bad", "{bad")
    batch.die(2)
    assert batch.run() == [5, 6]  # the third and the fourth have the record of the first
    assert batch.output.read_bytes().count(b"\n") == 6


def test_a_line_that_the_engine_has_refused_is_tried_again(batch: Batch) -> None:
    """With more memory it may be served; one that makes no sense never will."""
    batch.write_input({"id": "a", "prompt": "1"}, "{bad")

    def serve() -> None:
        with open_earlier(batch.output, False, lambda: None) as earlier:
            writer = ResumableWriter(earlier, KEYS)
            (_, good), (_, bad) = writer.pending(read_lines(batch.input, batch.sampling))
            refused = good.refused("cache_too_small", "raise --kv-memory")
            writer.write(0, record_of(refused), refused)
            writer.write(1, record_of(bad), bad)
            raise Death

    with pytest.raises(Death):
        serve()
    assert batch.run() == [1]


PARAMS = SamplingParams(temperature=1.0)
LINE = InputLine(3, "a", "hello", PARAMS)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"id": 3},
        {"id": "3"},
        {"id": None},
        {"prompt": "hello "},
        {"prompt": [1, 2]},
        {"prompt": [{"role": "user", "content": "hello"}]},
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]},
        {"format": "openai"},
        {"format": "openai", "model": "m"},
        {"format": "openai", "model": "m", "number": 4},
        *(
            {"params": dataclasses.replace(PARAMS, **option)}
            for option in (
                {"max_new_tokens": 63},
                {"temperature": 0.5},
                {"top_k": 5},
                {"top_p": 0.5},
                {"seed": 1},
                {"n": 2},
                {"stop": ("a",)},
                {"stop": ("a", "b")},
                {"stop": ("ab",)},
                {"ignore_eos": True},
                {"logprobs": True},
            )
        ),
    ],
)
def test_whatever_may_change_the_record_changes_the_key(change: dict[str, object]) -> None:
    assert KEYS.of(dataclasses.replace(LINE, **change)) != KEYS.of(LINE)


def test_what_does_not_change_the_record_does_not_change_the_key() -> None:
    assert KEYS.of(dataclasses.replace(LINE, number=9)) == KEYS.of(LINE)
    greedy = dataclasses.replace(LINE, params=SamplingParams())
    for option in ({"seed": 5}, {"top_k": 5}, {"top_p": 0.5}):
        assert KEYS.of(dataclasses.replace(greedy, params=SamplingParams(**option))) == KEYS.of(greedy)


def test_another_model_makes_other_keys(batch: Batch) -> None:
    batch.die(5)
    batch.keys = LineKeys({"model": "other"})
    assert len(batch.run()) == 10


def test_options_from_flags_are_part_of_a_line(batch: Batch) -> None:
    batch.write_input({"prompt": "1", "max_new_tokens": 3}, {"prompt": "2"}, {"prompt": "3"})
    batch.die(2)
    batch.sampling = SamplingParams(max_new_tokens=5)
    assert batch.run() == [2, 3]


def test_gzip_and_plain_text_are_resumed_alike(batch: Batch) -> None:
    plain = batch.input.read_bytes()
    batch.die(5)
    batch.input.write_bytes(gzip.compress(plain))
    assert batch.run() == [6, 7, 8, 9, 10]


def test_leftovers_of_killed_runs_are_swept(batch: Batch) -> None:
    folder = batch.output.parent
    left, other = folder / ".out.jsonl.0123abcd.tmp", folder / ".out.jsonl.mine.tmp"
    left.touch()
    other.touch()
    batch.run()
    assert not left.exists()
    assert other.exists()


class Full:
    """A limit on the size of files, as a full disk."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = num_bytes

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
        signal.signal(signal.SIGXFSZ, self._handler)


def test_a_full_disk_leaves_a_journal_that_can_be_resumed(batch: Batch) -> None:
    batch.die(3)
    size = batch.journal.stat().st_size
    with Full(size + 250), pytest.raises(FileError, match=r"cannot write .*out\.jsonl\.journal: File too large"):
        batch.run()
    assert batch.journal.read_bytes().endswith(b"}\n")  # nothing is half written
    assert batch.run() == [5, 6, 7, 8, 9, 10]


def test_a_disk_that_is_full_at_the_end_loses_nothing(batch: Batch) -> None:
    batch.write_input(*({"prompt": f"{number}" * 300} for number in range(1, 11)))
    batch.die(10)
    with Full(2000), pytest.raises(FileError, match=r"cannot write .*out\.jsonl: File too large"):
        batch.run()
    assert not batch.output.exists()
    assert batch.run() == []


def test_writes_reach_the_disk_by_themselves_and_only_they(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    arrived = threading.Event()
    file = (tmp_path / "file").open("w+b", buffering=0)

    def fsync(descriptor: int) -> None:
        synced.append((tmp_path / "file").read_bytes())
        arrived.set()

    monkeypatch.setattr(os, "fsync", fsync)
    with Syncer(file.fileno()) as syncer:
        for text in (b"a", b"b"):
            file.write(text)
            syncer.note_write()
            assert arrived.wait(60)  # without any further write
            arrived.clear()
        assert synced == [b"a", b"ab"]
    assert len(synced) == 3


def test_a_sync_that_fails_fails_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with (tmp_path / "file").open("wb") as file, Syncer(file.fileno()) as syncer:
        syncer.note_write()
        syncer._thread.join(60)
        with pytest.raises(OSError, match="No space"):
            syncer.note_write()


def test_the_table_finds_every_key_in_the_fullest_case(tmp_path: Path) -> None:
    keys = [bytes([0] * 8 + [number // 256, number % 256] + [0] * 6) for number in range(500)]  # all in one place
    table = KeyTable(tmp_path, len(keys))
    assert table.get(keys[0]) is None
    for number, key in enumerate(keys, 1):
        table.put(key, Span(number, 1))
    table.put(keys[7], Span(99, 2))
    assert [table.get(key) for key in keys[:8]] == [*(Span(number, 1) for number in range(1, 8)), Span(99, 2)]
    assert table.get(b"\xff" * 16) is None
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """Ten times the lines in the journal, and waiting behind the first, take no more memory."""
    script = Path(__file__).parents[1] / "support" / "journal_memory.py"
    peaks = []
    for count in (2_000, 25_000):
        result = subprocess.run(
            [sys.executable, script, tmp_path / f"{count}.jsonl", str(count)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(result.stdout))
    assert peaks[1] < peaks[0] + 5 * 2**20, peaks
