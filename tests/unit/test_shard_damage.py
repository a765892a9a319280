"""A set that is not exactly what its manifest says is refused, and the message names file, tensor and rank."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import h5py
import numpy as np
import pytest
import torch

from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.partition.plan import PlannedTensor
from mpi_tp.shards.checksum import checksum, file_entry
from mpi_tp.shards.reader import ShardSet
from tests.support.shards import (
    COLUMNS,
    SPLIT,
    WHOLE,
    flip,
    forged,
    read_manifest,
    set_options,
    write_manifest,
    write_set,
    write_small,
)

RANK_1 = "rank-00001-of-00002.h5"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_small(tmp_path / "shards", ranks=2)
    return tmp_path / "shards"


def part_extent(directory: Path, rank: int, name: str) -> tuple[int, int]:
    with ShardSet.open(directory).open_rank(rank) as file:
        part = file.tensors[name]
    return part.offset, part.offset + part.num_bytes


def test_no_folder_and_no_manifest(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(FileError, match="holds no finished shard set"):
        ShardSet.open(tmp_path / "nowhere")
    (shards / "manifest.json").unlink()
    with pytest.raises(FileError, match=r"no manifest\.json.*python -m sharder SOURCE"):
        ShardSet.open(shards)


def fails(*_: object) -> NoReturn:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_a_rank_file_whose_metadata_cannot_be_read_is_named(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ShardSet.open(shards)
    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(FileError, match=rf"{RANK_1} cannot be read: Stale file handle"):
        opened.open_rank(1)


def test_a_tokenizer_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(FileError, match=r"tokenizer\.json cannot be read: Stale file handle"):
        file_entry(tmp_path / "tokenizer.json")


def test_a_missing_and_a_truncated_rank_file_are_found_before_any_is_read(shards: Path) -> None:
    path = shards / RANK_1
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FileError, match=f"{RANK_1} is damaged: it has {len(whole) - 1} bytes, .* {len(whole)}"):
        ShardSet.open(shards)
    path.unlink()
    with pytest.raises(FileError, match=f"{RANK_1} cannot be opened: No such file"):
        ShardSet.open(shards)


@pytest.mark.parametrize("name", [SPLIT, WHOLE])
@pytest.mark.parametrize("position", [0, 1, -1])
def test_a_flipped_bit_of_a_tensor_is_found_on_reading_it(shards: Path, name: str, position: int) -> None:
    start, stop = part_extent(shards, 1, name)
    flip(shards / RANK_1, (start if position >= 0 else stop) + position)
    with (
        ShardSet.open(shards).open_rank(1) as file,
        pytest.raises(FileError, match=f"{RANK_1}: tensor {name} of rank 1 is damaged"),
    ):
        file.read(name)


def test_a_flipped_bit_outside_the_tensors_is_found_on_opening(shards: Path) -> None:
    inside = [part_extent(shards, 1, name) for name in (SPLIT, WHOLE)]
    path = shards / RANK_1
    outside = [i for i in range(path.stat().st_size) if not any(start <= i < stop for start, stop in inside)]
    for offset in outside[::97]:
        flip(path, offset)
        with pytest.raises(FileError, match=RANK_1):
            ShardSet.open(shards).open_rank(1)
        flip(path, offset)
    ShardSet.open(shards).open_rank(1).close()


def test_any_flipped_bit_of_the_manifest_is_found(shards: Path) -> None:
    for offset in range(0, (shards / "manifest.json").stat().st_size, 7):
        flip(shards / "manifest.json", offset)
        with pytest.raises(FileError, match=r"manifest\.json is damaged"):
            ShardSet.open(shards)
        flip(shards / "manifest.json", offset)


def test_files_of_two_sets_are_not_mixed(shards: Path, tmp_path: Path) -> None:
    other = write_small(tmp_path / "other", ranks=2, seed=1)
    shutil.copy(tmp_path / "other" / RANK_1, shards)
    with pytest.raises(FileError, match=f"{RANK_1} belongs to shard set {other.set_id}.*two sets are mixed"):
        ShardSet.open(shards).open_rank(1)


def test_a_rank_file_in_the_place_of_another_is_refused(shards: Path) -> None:
    with forged(shards, 1) as file:
        file.attrs["rank"] = 0
    with pytest.raises(FileError, match="rank is 0 instead of 1"):
        ShardSet.open(shards).open_rank(1)


def test_a_newer_version_is_refused_with_both_versions(shards: Path) -> None:
    head, _, body = (shards / "manifest.json").read_bytes().partition(b"\n")
    body = body.replace(b'"version": 1', b'"version": 2')
    (shards / "manifest.json").write_bytes(b'{"digest": "%s",\n' % checksum(body).encode() + body)
    with pytest.raises(ConfigurationError, match=r"version 2, this program reads .* version 1"):
        ShardSet.open(shards)
    assert head.startswith(b'{"digest": "')


def test_a_manifest_that_names_other_files_is_refused(shards: Path) -> None:
    manifest = read_manifest(shards)
    files = [manifest.files[0], dataclasses.replace(manifest.files[1], name="../escape.h5")]
    write_manifest(shards, dataclasses.replace(manifest, files=files))
    with pytest.raises(FileError, match=r"it names .*\.\./escape\.h5"):
        ShardSet.open(shards)
    outside = dataclasses.replace(manifest.files[0], name="../rank-00000-of-00002.h5")
    write_manifest(shards, dataclasses.replace(manifest, tokenizer=[outside]))
    with pytest.raises(FileError, match="is no name of a tokenizer file"):
        ShardSet.open(shards)


def extra_dataset(file: h5py.File, shards: Path) -> None:
    file["surprise"] = np.zeros(3)


def missing_dataset(file: h5py.File, shards: Path) -> None:
    del file[WHOLE]


def external_link(file: h5py.File, shards: Path) -> None:
    del file[WHOLE]
    file[WHOLE] = h5py.ExternalLink("rank-00000-of-00002.h5", WHOLE)


def soft_link(file: h5py.File, shards: Path) -> None:
    file.move(WHOLE, "hidden")
    file[WHOLE] = h5py.SoftLink("/hidden")


def group(file: h5py.File, shards: Path) -> None:
    del file[WHOLE]
    file.create_group(WHOLE)


def replace_whole(file: h5py.File, **settings: object) -> None:
    """Put another dataset with the same attributes and values in the place of WHOLE."""
    values, attributes = file[WHOLE][...], dict(file[WHOLE].attrs)
    del file[WHOLE]
    dataset = file.create_dataset(WHOLE, **{"data": values, **settings})
    dataset.attrs.update(attributes)


def filtered(file: h5py.File, shards: Path) -> None:
    replace_whole(file, compression="gzip")


def chunked(file: h5py.File, shards: Path) -> None:
    replace_whole(file, chunks=(10,))


def external_storage(file: h5py.File, shards: Path) -> None:
    replace_whole(file, external=[(str(shards / "elsewhere.raw"), 0, 4 * COLUMNS)])


def other_type(file: h5py.File, shards: Path) -> None:
    replace_whole(file, dtype=">f4")


def other_shape(file: h5py.File, shards: Path) -> None:
    replace_whole(file, data=np.zeros((2, COLUMNS // 2), "f4"))


def other_ranges(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["ranges"] = np.array([[0, 17]])


def other_axis(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["axis"] = 1


def other_torch_dtype(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["torch_dtype"] = np.bytes_("int32")


def no_checksum(file: h5py.File, shards: Path) -> None:
    del file[SPLIT].attrs["xxh3_128"]


def virtual(file: h5py.File, shards: Path) -> None:
    layout = h5py.VirtualLayout((COLUMNS,), "f4")
    layout[:] = h5py.VirtualSource(str(shards / "elsewhere.h5"), "x", (COLUMNS,))
    attributes = dict(file[WHOLE].attrs)
    del file[WHOLE]
    file.create_virtual_dataset(WHOLE, layout).attrs.update(attributes)


def unknown_filter(file: h5py.File, shards: Path) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((10,))
    creation.set_filter(305, h5py.h5z.FLAG_OPTIONAL, (1, 2))
    attributes = dict(file[WHOLE].attrs)
    del file[WHOLE]
    space = h5py.h5s.create_simple((COLUMNS,))
    h5py.h5d.create(file.id, WHOLE.encode(), h5py.h5t.IEEE_F32LE, space, creation)
    file[WHOLE].attrs.update(attributes)


def absurd_size(file: h5py.File, shards: Path) -> None:
    attributes = dict(file[WHOLE].attrs)
    del file[WHOLE]
    file.create_dataset(WHOLE, (10**15,), "f4").attrs.update(attributes)


def text_of_any_length(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["torch_dtype"] = "float32"


def no_value(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["axis"] = h5py.Empty("i8")


def reference(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["ranges"] = file.ref


def floating_axis(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["axis"] = 0.0


def unknown_attribute(file: h5py.File, shards: Path) -> None:
    file[SPLIT].attrs["surprise"] = np.int64(1)


def named_type(file: h5py.File, shards: Path) -> None:
    del file[WHOLE]
    file[WHOLE] = np.dtype("f4")


def never_written(file: h5py.File, shards: Path) -> None:
    attributes = dict(file[WHOLE].attrs)
    del file[WHOLE]
    file.create_dataset(WHOLE, (COLUMNS,), "f4").attrs.update(attributes)


FORGERIES: dict[Callable[[h5py.File, Path], None], str] = {
    extra_dataset: "it holds surprise, which the manifest does not know",
    missing_dataset: f"tensor {WHOLE} of rank 1 is missing",
    external_link: f"tensor {WHOLE} of rank 1 is a link",
    soft_link: "hidden|is a link",
    group: f"tensor {WHOLE} of rank 1 is no dataset",
    filtered: f"tensor {WHOLE} of rank 1: (layout|filters) is",
    chunked: f"tensor {WHOLE} of rank 1: layout is",
    external_storage: f"tensor {WHOLE} of rank 1: external files is 1 instead of 0",
    other_type: f"tensor {WHOLE} of rank 1: stored type",
    other_shape: rf"tensor {WHOLE} of rank 1: shape is \(2, 20\) instead of \(40,\)",
    other_ranges: rf"tensor {SPLIT} of rank 1: ranges is \[\[0, 17\]\] instead of \[\[48, 65\]\]",
    other_axis: f"tensor {SPLIT} of rank 1: axis is 1 instead of 0",
    other_torch_dtype: f"tensor {SPLIT} of rank 1: torch_dtype is 'int32' instead of 'float32'",
    no_checksum: f"tensor {SPLIT} of rank 1: xxh3_128 is None",
    virtual: f"tensor {WHOLE} of rank 1: layout is",
    unknown_filter: f"tensor {WHOLE} of rank 1: (layout|filters) is",
    absurd_size: rf"tensor {WHOLE} of rank 1: shape is \(1000000000000000,\) instead of \(40,\)",
    text_of_any_length: rf"tensor {SPLIT} of rank 1: torch_dtype is '\(8 bytes of another type\)'",
    no_value: rf"tensor {SPLIT} of rank 1: axis is .* instead of 0",
    reference: rf"tensor {SPLIT} of rank 1: ranges is '\(8 bytes of another type\)'",
    floating_axis: rf"tensor {SPLIT} of rank 1: axis is '\(8 bytes of another type\)' instead of 0",
    unknown_attribute: rf"tensor {SPLIT} of rank 1: surprise is 1 instead of None",
    named_type: f"tensor {WHOLE} of rank 1 is no dataset",
    never_written: f"tensor {WHOLE} .*has no space",
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_file_of_another_structure_is_refused(shards: Path, forge: Callable[[h5py.File, Path], None]) -> None:
    with forged(shards, 1) as file:
        forge(file, shards)
    with pytest.raises(FileError, match=f"{RANK_1} is damaged: .*({FORGERIES[forge]})"):
        ShardSet.open(shards).open_rank(1)


def rewrite(shards: Path, **changes: object) -> None:
    """Change fields of the manifest and compute its digest anew."""
    fields = {**json.loads((shards / "manifest.json").read_bytes()), **changes}
    del fields["digest"]
    body = json.dumps(fields)[1:].encode()
    (shards / "manifest.json").write_bytes(b'{"digest": "%s",\n' % checksum(body).encode() + body)


def tensor(**changes: object) -> list[dict[str, object]]:
    sound = {"name": "a", "shape": [4], "axis": 0, "ranges": [[[0, 2]], [[2, 4]]], "dtype": "float32", "checksum": "0"}
    return [{**sound, **changes}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 10**12}, "it has 2 files for 1000000000000 ranks"),
        ({"ranks": -1}, "ranks is -1: it must be a whole number"),
        ({"strategy": ["paired"]}, "strategy is"),
        ({"tokenizer": [{"name": "..", "size": 0, "digest": ""}]}, r"'\.\.' is no name of a tokenizer file"),
        ({"tokenizer": [{"name": ".bashrc", "size": 0, "digest": ""}]}, r"'\.bashrc' is no name of a tokenizer file"),
        ({"tokenizer": [{"name": "a\0", "size": 0, "digest": ""}]}, "name is .* must be text"),
        ({"tensors": tensor(shape=[10**15])}, "no rank holds index 4 of tensor a, whose axis has 1000000000000000"),
        ({"tensors": tensor(shape=[-4])}, "a: shape is -4"),
        ({"tensors": tensor(shape=[4, 1 << 40, 1 << 40])}, "which no tensor can have"),
        ({"tensors": tensor(axis=1)}, "a: axis is 1: it must be a whole number from 0 to 0"),
        ({"tensors": tensor(axis=True)}, "a: axis is True"),
        ({"tensors": tensor(ranges=[[[0, 2]], [[2, 5]]])}, "no rank holds index 5 of tensor a"),
        ({"tensors": tensor(ranges=[[[0, 2]], [[3, 4]]])}, "no rank holds index 2 of tensor a"),
        ({"tensors": tensor(ranges=[[[2, 0]], [[2, 4]]])}, r"has the range \[2, 0\] after index 0"),
        ({"tensors": tensor(ranges=[[[0, 4]]])}, "has the ranges of 1 ranks"),
        ({"tensors": tensor(name="a\nb")}, "a tensor's name is"),
        ({"tensors": tensor() * 2}, "a occurs twice"),
        ({"tensors": tensor(dtype="complex64")}, "is no manifest of a shard set"),
    ],
)
def test_a_manifest_with_absurd_fields_is_refused(shards: Path, changes: dict[str, object], message: str) -> None:
    rewrite(shards, **changes)
    with pytest.raises(FileError, match=message) as failure:
        ShardSet.open(shards)
    assert str(failure.value).isprintable()


def test_deep_json_is_refused(shards: Path) -> None:
    body = b'"config": ' + b"[" * 100_000
    (shards / "manifest.json").write_bytes(b'{"digest": "%s",\n' % checksum(body).encode() + body)
    with pytest.raises(FileError, match="is no manifest"):
        ShardSet.open(shards)


def test_a_pipe_in_the_place_of_a_rank_file_is_refused(shards: Path) -> None:
    (shards / RANK_1).unlink()
    os.mkfifo(shards / RANK_1)
    with pytest.raises(FileError, match="is no file but a folder, a pipe or a device"):
        ShardSet.open(shards)


def test_a_tokenizer_file_that_leads_out_of_the_set_is_refused(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (shards / "tokenizer").mkdir()
    (shards / "tokenizer" / "tokenizer.json").symlink_to(tmp_path / "secret")
    entry = dataclasses.replace(file_entry(tmp_path / "secret"), name="tokenizer.json")
    write_manifest(shards, dataclasses.replace(read_manifest(shards), tokenizer=[entry]))
    with pytest.raises(FileError, match="is a link to a file outside the set"):
        ShardSet.open(shards)


def test_two_tensors_do_not_share_their_bytes(tmp_path: Path) -> None:
    plan = {name: PlannedTensor(name, (4,), None, ()) for name in ("a", "b")}
    write_set(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)}, plan, set_options(1))
    with forged(tmp_path, 0) as file:
        del file["b"]
        file["b"] = file["a"]
    with pytest.raises(FileError, match=r"tensor b at byte .* lies in the space of another"):
        ShardSet.open(tmp_path).open_rank(0)
