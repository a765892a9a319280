"""The output of a batch: in order, whole or absent, and never written over what it should not touch."""

import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_tp.atomic import replacing
from mpi_tp.errors import FileError
from mpi_tp.records import OrderedWriter, write_meta


def test_any_order_of_records_gives_the_same_file(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    for order in itertools.permutations(range(5)):
        with OrderedWriter.open(output) as writer:
            for sequence in order:
                writer.write(sequence, {"id": sequence})
        assert output.read_text() == '{"id": 0}\n{"id": 1}\n{"id": 2}\n{"id": 3}\n{"id": 4}\n'


def test_a_record_is_passed_on_as_soon_as_its_turn_comes(tmp_path: Path):
    """Another tool kept all results until the end, and an interrupted job had none (vLLM #30268)."""
    output = tmp_path / "pipe"
    os.mkfifo(output)
    reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    with OrderedWriter.open(output) as writer:
        writer.write(1, {"id": 1})
        with pytest.raises(BlockingIOError):
            os.read(reader, 100)
        writer.write(0, {"id": 0})
        assert os.read(reader, 100) == b'{"id": 0}\n{"id": 1}\n'
    os.close(reader)


@pytest.mark.parametrize("sequences", [(0, 0), (1, 1), (0, 2), (1,)])
def test_a_record_twice_or_never_is_a_bug_that_leaves_no_file(tmp_path: Path, sequences: tuple[int, ...]):
    def write() -> None:
        with OrderedWriter.open(tmp_path / "out.jsonl") as writer:
            for sequence in sequences:
                writer.write(sequence, {})

    with pytest.raises(AssertionError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_text_is_written_as_it_is_and_half_a_surrogate_pair_as_an_escape(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    records = [{"text": "caf\u00e9 \u4f60\u597d \U0001f600\u2028\n"}, {"id": "\ud800\u00e9"}]
    with OrderedWriter.open(output) as writer:
        for sequence, item in enumerate(records):
            writer.write(sequence, item)
    first, second = output.read_bytes().split(b"\n")[:-1]
    assert "caf\u00e9 \u4f60\u597d \U0001f600".encode() in first
    assert [json.loads(first), json.loads(second)] == records


def test_the_file_appears_only_when_all_is_done(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    with OrderedWriter.open(output) as writer:
        writer.write(0, {"id": 0})
        assert output.read_text() == "old"
    assert output.read_text() == '{"id": 0}\n'
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]):
    output = tmp_path / "out.jsonl"
    output.write_text("old")

    def fail() -> None:
        with OrderedWriter.open(output) as writer:
            writer.write(0, {"id": 0})
            raise failure

    with pytest.raises(failure):
        fail()
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_errors_of_the_block_are_not_blamed_on_the_output(tmp_path: Path):
    def fail() -> None:
        with OrderedWriter.open(tmp_path / "out.jsonl"):
            raise ConnectionResetError("a rank is gone")

    with pytest.raises(ConnectionResetError):
        fail()


@pytest.mark.parametrize("name", ["missing/out.jsonl", ".", "file/out.jsonl", "x" * 300])
def test_an_output_that_cannot_be_made_is_refused_at_once(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    reached = False
    with pytest.raises(FileError, match="cannot write"), OrderedWriter.open(tmp_path / name):
        reached = True
    assert not reached


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to protected files")
def test_a_protected_file_is_not_replaced(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    output.touch(0o444)
    with pytest.raises(FileError, match="Permission denied"), OrderedWriter.open(output):
        pass


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    output = tmp_path / "out.jsonl"
    output.symlink_to("disk/real.jsonl")
    with OrderedWriter.open(output) as writer:
        writer.write(0, {})
    assert output.is_symlink()
    assert (tmp_path / "disk" / "real.jsonl").read_text() == "{}\n"


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path):
    output, other = tmp_path / "out.jsonl", tmp_path / "other"
    with OrderedWriter.open(output):
        pass
    other.touch()
    assert stat.S_IMODE(output.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_device_is_written_to_and_not_replaced():
    null = Path("/dev/null")
    with OrderedWriter.open(null) as writer:
        writer.write(0, {})
    assert null.is_char_device()


def test_a_full_disk_is_a_file_error():
    full = Path("/dev/full")
    with pytest.raises(FileError, match="cannot write /dev/full: No space left"), OrderedWriter.open(full) as writer:
        writer.write(0, {})


def run(code: str, **settings) -> subprocess.CompletedProcess[bytes]:
    imports = "import resource, signal, sys; from pathlib import Path; from mpi_tp.records import OrderedWriter\n"
    return subprocess.run([sys.executable, "-c", imports + code], stderr=subprocess.PIPE, **settings)


def test_a_file_that_outgrows_its_limit_is_a_file_error_and_leaves_nothing(tmp_path: Path):
    job = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with OrderedWriter.open(Path('out.jsonl')) as writer:\n"
        "    for sequence in range(100): writer.write(sequence, {'text': 'x' * 1000})\n",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert job.stderr.splitlines()[-1] == b"mpi_tp.errors.FileError: cannot write out.jsonl: File too large"
    assert list(tmp_path.iterdir()) == []


def test_standard_output_is_utf8_in_any_locale():
    code = "with OrderedWriter.open(None) as writer: writer.write(1, {'b': 'é'}); writer.write(0, {'a': 1})"
    job = run(code, stdout=subprocess.PIPE, env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert job.stdout == '{"a": 1}\n{"b": "é"}\n'.encode()


def test_a_closed_standard_output_is_a_file_error():
    reader, writer = os.pipe()
    os.close(reader)
    job = run("with OrderedWriter.open(None) as writer: writer.write(0, {})", stdout=writer)
    os.close(writer)
    assert b"mpi_tp.errors.FileError: cannot write standard output: Broken pipe" in job.stderr


def test_the_facts_lie_beside_the_output(tmp_path: Path):
    write_meta(tmp_path / "out.jsonl", {"ranks": 3, "hosts": ["nöde"]})
    assert json.loads((tmp_path / "out.jsonl.meta.json").read_bytes()) == {"ranks": 3, "hosts": ["nöde"]}
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.meta.json"]
    with pytest.raises(FileError, match=r"missing/out\.jsonl\.meta\.json"):
        write_meta(tmp_path / "missing" / "out.jsonl", {})


def test_a_file_that_appears_at_the_end_takes_the_place_of_no_pipe(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="device or a pipe"), replacing(tmp_path / "pipe"):
        pass
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
