"""`torch.save` files: views, tied and transposed tensors, archives packed by others, and hostile pickles."""

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi_tp.errors import ConfigurationError, FileError, JobError, StoppedError
from sharder.formats import open_checkpoint, torch_file
from tests.support.checkpoints import bits_equal


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def repack(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> Path:
    """Pack the records of an archive again, in another order; `replaced` gives new bytes by last name part."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in sorted(old.namelist(), reverse=True):
            key = name.rpartition("/")[2].replace(".", "_")
            new.writestr(name, replaced.get(key, old.read(name)))
    return target


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 10).bfloat16()
    fused = torch.randn(12, 5)
    return {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "every_second": base[::2, ::3],
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "q": fused[:4],
        "k": fused[4:8],
        "scalar": fused[5, 2],
        "no_rows": base[3:3],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "one_row": torch.randn(1, 7)[:, 2:5],
    }


def test_views_are_read_as_torch_loads_them(tmp_path: Path) -> None:
    path = save(tmp_path / "views.pt", views())
    expected = torch.load(path, weights_only=True)
    with open_checkpoint(path) as reader:
        assert reader.names() == list(expected)
        for name, tensor in expected.items():
            read = reader.read(name)
            assert bits_equal(read, tensor.detach()), name
            assert read.is_contiguous()
            assert read.untyped_storage().nbytes() == read.nbytes, name


def test_tied_tensors_are_stored_once_and_read_apart(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    path = save(tmp_path / "tied.pt", {"embed.weight": weight, "head.weight": weight})
    with open_checkpoint(path) as reader:
        assert reader.source_size() < 2 * weight.nbytes
        embed, head = reader.read("embed.weight"), reader.read("head.weight")
        assert torch.equal(embed, head)
        assert embed.data_ptr() != head.data_ptr()


def test_an_archive_packed_again_is_read_right(tmp_path: Path) -> None:
    """torch.load on the meta device computes other offsets here; equal sizes would make a mix-up silent."""
    weights = {f"{index}.weight": torch.full((4, 4), float(index)) for index in range(12)}
    path = repack(save(tmp_path / "a.pt", weights), tmp_path / "b.pt")
    with open_checkpoint(path) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_and_config_under_their_keys(key: str, tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    config = {"hidden_size": 3, "architectures": ["LlamaForCausalLM"], "rope_scaling": None}
    path = save(tmp_path / "both.pt", {key: {"weight": weight}, "config": config, "optimizer": {"step": 7}})
    with open_checkpoint(path) as reader:
        assert reader.config == config
        assert torch.equal(reader.read("weight"), weight)


def test_a_module_state_dict_with_its_metadata(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with open_checkpoint(save(tmp_path / "ordered.pt", layers.state_dict())) as reader:
        assert reader.names() == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert torch.equal(reader.read("1.bias"), layers[1].bias)


class Attack:
    """Unpickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (Attack(os.system, "touch ran"), "posix.system"),
        (Attack(eval, "open('ran', 'w')"), "eval"),
        (Attack(exec, "open('ran', 'w')"), "exec"),
        (Attack(getattr, "text", "upper"), "getattr"),
        (Attack(Path, "ran"), "pathlib.Path"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_pickled_code_is_named_and_never_run(
    attack: Attack, named: str, wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"weight": torch.zeros(2), "bias": attack}
    save(tmp_path / "hostile.pt", {"model": weights} if wrapped else weights)
    with pytest.raises(ConfigurationError, match=f"hostile.pt asks for more than tensors, refused: .*GLOBAL {named} "):
        open_checkpoint(tmp_path / "hostile.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b".",
        b"garbage",
        pickle.dumps({"weight": 1}, protocol=2)[:-1],
        b"\x80\x02(lp0\nI1\na.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02" + b"(" * 10_000 + b".",
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85R.",
    ],
)
def test_a_broken_pickle_is_a_configuration_error(stream: bytes, tmp_path: Path) -> None:
    path = repack(save(tmp_path / "a.pt", {"weight": torch.zeros(2)}), tmp_path / "b.pt", data_pkl=stream)
    with pytest.raises(ConfigurationError, match=r"b\.pt"):
        open_checkpoint(path)


def test_a_spoiled_pickle_never_ends_in_a_traceback(tmp_path: Path) -> None:
    """The archive's own checksum is right here, so that the spoiled bytes reach the unpickler."""
    path = save(tmp_path / "a.pt", {"model": {"weight": torch.randn(4, 6).t()}, "config": {"hidden_size": 6}})
    with zipfile.ZipFile(path) as archive:
        stream = archive.read("a/data.pkl")
    for position in range(2, len(stream)):
        spoiled = stream[:position] + bytes([stream[position] ^ 0x1F]) + stream[position + 1 :]
        with (
            contextlib.suppress(JobError),
            open_checkpoint(repack(path, tmp_path / "b.pt", data_pkl=spoiled)) as reader,
        ):
            for name in reader.names():
                reader.read(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "holds a Tensor, not a state dict"),
        ([torch.zeros(3)], "holds a list"),
        ({"weight": [torch.zeros(3)]}, "'weight' is a list"),
        ({"layers": {"weight": torch.zeros(3)}}, "'layers' is a dict"),
        ({3: torch.zeros(3)}, "3 is a Tensor, a state dict has named tensors"),
        ({"model": {}, "state_dict": {}}, 'both "model" and "state_dict"'),
        ({"model": {}, "config": "llama"}, '"config" is a str'),
        ({"weight": torch.eye(3).to_sparse()}, "weight is not a plain dense tensor"),
        ({"weight": torch.zeros(3, dtype=torch.complex64).conj()}, "weight is not a plain dense tensor"),
        ({"weight": torch.zeros(1).expand(1 << 40)}, "weight is an expanded view, 1099511627776 elements of 1 stored"),
        ({"weight": torch.empty(3, device="meta")}, "weight has no data, it was saved from the meta device"),
    ],
)
def test_other_contents_are_refused_by_name(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_checkpoint(save(tmp_path / "other.pt", content))


def test_a_view_beyond_its_storage_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"weight": torch.zeros(2)})
    with zipfile.ZipFile(path) as archive:
        shape = b"K\x02\x85"  # the size (2,)
        stream = archive.read("a/data.pkl")
    assert stream.count(shape) == 1
    path = repack(path, tmp_path / "b.pt", data_pkl=stream.replace(shape, b"K\x09\x85"))
    with pytest.raises(FileError, match="weight ends at byte 36 of its storage, which has 8"):
        open_checkpoint(path)


def test_a_call_that_reserves_memory_is_refused(tmp_path: Path) -> None:
    stream = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R."
    path = repack(save(tmp_path / "a.pt", {"weight": torch.zeros(2)}), tmp_path / "b.pt", data_pkl=stream)
    with pytest.raises(ConfigurationError, match=r"asks for more than tensors, refused: GLOBAL builtins\.bytearray"):
        open_checkpoint(path)


def test_a_record_that_is_there_twice_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"weight": torch.zeros(5)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/data/0", bytes(20))
    with pytest.raises(FileError, match="zip record a/data/0 is there twice"):
        open_checkpoint(path)


def test_a_record_whose_own_header_lies_is_damage(tmp_path: Path) -> None:
    """Its lengths say where the data begin, and no checksum covers them."""
    path = save(tmp_path / "a.pt", {"weight": torch.arange(64.0)})
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("a/data/0").header_offset
    for field in (26, 28):
        damaged = bytearray(path.read_bytes())
        damaged[at + field] ^= 4
        (tmp_path / "b.pt").write_bytes(damaged)
        with pytest.raises(FileError, match="zip record a/data/0 is not where its header says"):
            open_checkpoint(tmp_path / "b.pt")


def test_a_missing_or_short_record_is_damage(tmp_path: Path) -> None:
    path = repack(save(tmp_path / "a.pt", {"weight": torch.zeros(5)}), tmp_path / "b.pt", **{"0": bytes(12)})
    with pytest.raises(FileError, match="storage 0 has 20 bytes, 12 of them are there"):
        open_checkpoint(path)


def test_the_legacy_format_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        ConfigurationError, match=r"old\.pt is in PyTorch's legacy, non-zip format: load and re-save it"
    ):
        open_checkpoint(tmp_path / "old.pt")


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"weight": torch.zeros(5)})
    with pytest.raises(ConfigurationError, match="is compressed"):
        open_checkpoint(repack(path, tmp_path / "deflated.pt", zipfile.ZIP_DEFLATED))
    with pytest.raises(ConfigurationError, match="saved on a b'big'-endian machine"):
        open_checkpoint(repack(path, tmp_path / "big.pt", byteorder=b"big"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(ConfigurationError, match="TorchScript archive"):
        open_checkpoint(path)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "no tensors")
    with pytest.raises(ConfigurationError, match=r"zip archive without data\.pkl"):
        open_checkpoint(tmp_path / "other.zip")


def test_a_signal_while_the_structure_is_read_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise StoppedError("stopped by SIGTERM")

    torch.save({"a": torch.ones(3)}, tmp_path / "base.pt")
    monkeypatch.setattr(torch_file._StructureUnpickler, "persistent_load", stop)
    with pytest.raises(StoppedError):
        open_checkpoint(tmp_path / "base.pt")
