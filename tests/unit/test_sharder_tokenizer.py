"""The tokenizer of a set: where it comes from, and that none goes in that could not be loaded."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from mpi_tp.errors import ConfigurationError, FileError
from sharder import Sharder
from tests.support.checkpoints import FORMS, write_model_and_config
from tests.support.engines import save_tokenizer
from tests.support.shards import contents
from tests.support.tiny import tiny_model

LLAMA = tiny_model("llama", torch.bfloat16)
CONFIGS = ("tokenizer_config.json", "generation_config.json")


def write_tokenizer_files(folder: Path, mark: str) -> None:
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder, mark=mark)
    (folder / "generation_config.json").write_text(json.dumps({"mark": mark}))


def test_where_the_tokenizer_comes_from(tmp_path: Path) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    report = Sharder(source, 2, tmp_path / "without").run()
    assert report.lacks_tokenizer
    assert report.shards.open_tokenizer() is None
    write_tokenizer_files(tmp_path, "beside")
    write_tokenizer_files(tmp_path / "named", "named")
    for named, mark in ((None, "beside"), (tmp_path / "named", "named")):
        report = Sharder(source, 2, tmp_path / mark, tokenizer=named).run()
        folder = report.shards.open_tokenizer()
        assert not report.lacks_tokenizer
        assert folder is not None
        assert sorted(contents(folder)) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
        marked = [json.loads((folder / name).read_text())["mark"] for name in CONFIGS]
        assert marked == [mark, mark]
    with pytest.raises(FileError, match=r"nowhere/tokenizer\.json does not exist"):
        Sharder(source, 2, tmp_path / "shards", tokenizer=tmp_path / "nowhere").run()


def test_the_generation_config_beside_the_source_completes_a_named_tokenizer(tmp_path: Path) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    write_tokenizer_files(tmp_path, "beside")
    write_tokenizer_files(tmp_path / "named", "named")
    (tmp_path / "named" / "generation_config.json").unlink()
    folder = Sharder(source, 2, tmp_path / "shards", tokenizer=tmp_path / "named").run().shards.open_tokenizer()
    assert folder is not None
    assert [json.loads((folder / name).read_text())["mark"] for name in CONFIGS] == ["named", "beside"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer.json", "{}", FileError),
        ("tokenizer_config.json", '{"bos_token": {}}', FileError),
        ("generation_config.json", '{"eos_token_id": "2"}', FileError),
        ("chat_template.jinja", "{% if %}", ConfigurationError),
    ],
)
def test_a_broken_tokenizer_is_refused_while_sharding(
    tmp_path: Path, name: str, content: str, error: type[Exception]
) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=name.replace(".", r"\.")):
        Sharder(source, 2, tmp_path / "shards").run()
    assert not (tmp_path / "shards").exists()


def test_a_tokenizer_that_cannot_be_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    save_tokenizer(tmp_path)

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(FileError, match=r"tokenizer\.json: No space left on device"):
        Sharder(source, 2, tmp_path / "shards").run()


def test_the_tokenizer_inside_a_folder(tmp_path: Path) -> None:
    source = FORMS["folder"](LLAMA, tmp_path)
    write_tokenizer_files(source, "inside")
    assert Sharder(source, 2, tmp_path / "shards").run().shards.open_tokenizer() is not None
