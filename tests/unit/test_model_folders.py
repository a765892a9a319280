"""Damaged and contradictory `.safetensors` files and Hugging Face folders."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mpi_tp.errors import ConfigurationError, FileError
from sharder.formats import open_checkpoint


def safetensors_bytes(header: Any, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, "b overlaps the tensor before it: it begins at byte 4, not 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, "b leaves a gap"),
        ({"a": entry(4, 12)}, "a leaves a gap"),
        ({"a": entry(0, 8)}, r"by its header it has \d+ bytes, it has \d+"),
        ({"a": entry(0, 24, [6])}, r"by its header it has \d+ bytes, it has \d+"),
        ({"a": entry(0, 20)}, r"a takes 20 bytes, F32 \[2\] is 8 bytes"),
        ({"a": entry(0, 20, [5], "F16")}, r"a takes 20 bytes, F16 \[5\] is 10 bytes"),
        ({"a": entry(8, 0)}, "a takes -8 bytes"),
        ({"a": entry(-8, 0)}, "offsets -8 and 0"),
        ({"a": entry(0, 20, [-5, -1])}, r"shape \[-5, -1\]"),
        ({"a": entry(0, 20, [5.0])}, r"shape \[5.0\]"),
        ({"a": entry(0, 4, [True])}, r"shape \[True\]"),
        ({"a": entry(0, 0, [0, 1 << 70])}, "shape"),
        ({"a": entry(0, 20, "5")}, "a has no valid dtype, shape and data_offsets"),
        ({"a": entry(0, 20, [5], ["F32"])}, "a has no valid dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [5]}}, "a has no valid dtype, shape and data_offsets"),
        ({"a": 5}, "a has no valid dtype, shape and data_offsets"),
        (b'{"a": 1, "a": 2}', "not valid JSON: a name occurs twice"),
        (b"{" + b'"a":{' * 100_000, "not valid JSON"),
        (b"{\xff}", "not valid JSON"),
    ],
)
def test_a_damaged_header_is_a_file_error(header: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header, 20))
    with pytest.raises(FileError, match=rf"model\.safetensors is damaged: .*{message}"):
        open_checkpoint(path)


def test_a_header_longer_than_the_file_is_a_file_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length, message in (
        (1000, "truncated: the header ends at byte 1008"),
        (1 << 60, "a header of 1152921504606846976"),
    ):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(FileError, match=message):
            open_checkpoint(path)


def test_a_dtype_that_torch_does_not_have_is_a_configuration_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry(0, 20, [40], "F4")}, 20))
    with pytest.raises(ConfigurationError, match="a has dtype F4; known are"):
        open_checkpoint(path)


def test_metadata_and_padding_are_no_tensors(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(0, 8)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header + b" " * 13, 8))
    with open_checkpoint(path) as reader:
        assert reader.names() == ["a"]


def write_folder(folder: Path, files: dict[str, list[str]], index: dict[str, str] | None = None) -> Path:
    """Write safetensors files that hold a tensor [2] for each name, and an index."""
    for file, names in files.items():
        safetensors.torch.save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / file)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_files_without_index_and_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"part-1.safetensors": ["a"], "part-2.safetensors": ["bb"]})
    with open_checkpoint(folder) as reader:
        assert reader.config is None
        assert reader.names() == ["a", "bb"]
        assert reader.read("bb").tolist() == [2.0, 2.0]


def test_the_whole_file_wins_over_others(tmp_path: Path) -> None:
    """As in transformers: repositories also hold the original, unsplit weights under other names."""
    folder = write_folder(tmp_path, {"model.safetensors": ["a"], "consolidated.safetensors": ["a", "b"]})
    with open_checkpoint(folder) as reader:
        assert reader.names() == ["a"]


def test_the_index_decides_which_files_count(tmp_path: Path) -> None:
    files = {"one.safetensors": ["a"], "two.safetensors": ["b", "extra"], "consolidated.safetensors": ["a"]}
    folder = write_folder(tmp_path, files, {"a": "one.safetensors", "b": "two.safetensors"})
    with open_checkpoint(folder) as reader:
        assert reader.names() == ["a", "b", "extra"]


@pytest.mark.parametrize(
    ("files", "index", "error", "message"),
    [
        (
            {"one.safetensors": ["a"], "two.safetensors": ["a"]},
            None,
            ConfigurationError,
            "a is in .*one.* and in .*two",
        ),
        (
            {"one.safetensors": ["a"]},
            {"a": "one.safetensors", "b": "one.safetensors"},
            FileError,
            "b is in one.* no file",
        ),
        ({"one.safetensors": ["a"]}, {"a": "two.safetensors"}, FileError, "two.safetensors cannot be read"),
        ({"one.safetensors": ["a"]}, {"a": "../one.safetensors"}, FileError, "not a file of this folder"),
        ({"one.safetensors": ["a"]}, {"a": "/one.safetensors"}, FileError, "not a file of this folder"),
        ({"one.safetensors": ["a"]}, {"a": ".."}, FileError, "not a file of this folder"),
        ({"one.safetensors": ["a"]}, {"a": "one\0.safetensors"}, FileError, "not a file of this folder"),
        ({"one.safetensors": ["a"]}, {}, FileError, "it has no weight_map"),
        ({}, None, ConfigurationError, "holds no .safetensors and no pytorch_model"),
    ],
)
def test_a_contradictory_folder_is_refused(
    files: dict[str, list[str]], index: dict[str, str] | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(error, match=message):
        open_checkpoint(write_folder(tmp_path, files, index))
    assert os.listdir("/proc/self/fd") == before


def test_files_are_told_by_content_in_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin is in PyTorch's legacy"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": \x00}'])
def test_a_damaged_config_is_a_file_error(content: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FileError, match=r"config\.json is damaged"):
        open_checkpoint(tmp_path)


def test_a_symbolic_link_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_folder(blobs, {"model.safetensors": ["a"]}).joinpath("model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    with open_checkpoint(snapshot) as reader:
        assert reader.source_size() == (blobs / "0123").stat().st_size
        assert reader.names() == ["a"]
