"""What every checkpoint reader must do, and how the form of a source is recognised."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mpi_tp.errors import ConfigurationError, FileError, JobError
from sharder.formats import base, open_checkpoint
from sharder.formats.safetensors_file import DTYPES
from tests.support.checkpoints import FORMS, bits_equal, write_gguf
from tests.support.tiny import hf_weights, tiny_model

WITH_CONFIG = {"model_and_config", "folder", "sharded_folder", "bin_folder", "gguf"}
SINGLE_FILES = ("safetensors", "state_dict", "gguf")

MODELS = {
    "llama": tiny_model("llama"),
    "llama-f16": tiny_model("llama", torch.float16),
    "qwen2-bf16-tied": tiny_model("qwen2", torch.bfloat16),
    "qwen3": tiny_model("qwen3"),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(form: str, tmp_path: Path) -> Path:
    return FORMS[form](MODELS["llama"], tmp_path)


@pytest.mark.parametrize("model_name", MODELS)
def test_every_tensor_comes_back_bit_for_bit(form: str, model_name: str, tmp_path: Path) -> None:
    expected = hf_weights(MODELS[model_name])
    with open_checkpoint(FORMS[form](MODELS[model_name], tmp_path)) as reader:
        assert sorted(reader.names()) == sorted(expected)
        for name in reader.names():
            tensor = reader.read(name)
            assert bits_equal(tensor, expected[name]), name
            assert tensor.is_contiguous()
            assert (reader.spec(name).dtype, reader.spec(name).shape) == (tensor.dtype, tuple(tensor.shape))


def test_short_reads_are_continued(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "READ_CHUNK_BYTES", 7)
    expected = hf_weights(MODELS["llama"])
    with open_checkpoint(source) as reader:
        for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
            assert bits_equal(reader.read(name), expected[name])


def test_a_tensor_has_memory_of_its_own(source: Path) -> None:
    with open_checkpoint(source) as reader:
        name = reader.names()[0]
        first = reader.read(name)
        before = first.clone()
        reader.read(name).zero_()
        assert torch.equal(first, before)
        assert torch.equal(reader.read(name), before)


def test_config_is_the_one_in_the_source(form: str, source: Path) -> None:
    with open_checkpoint(source) as reader:
        if form not in WITH_CONFIG:
            assert reader.config is None
            return
        assert reader.config is not None
        for field in ("model_type", "hidden_size", "num_key_value_heads", "vocab_size", "rms_norm_eps"):
            assert reader.config[field] == getattr(MODELS["llama"].config, field), field


def test_size_and_digest_follow_the_files(source: Path) -> None:
    with open_checkpoint(source) as reader, open_checkpoint(source) as again:
        weights = [path for path in source.iterdir() if path.suffix != ".json"] if source.is_dir() else [source]
        assert reader.source_size() == sum(file.stat().st_size for file in weights)
        assert reader.header_digest() == again.header_digest()
        assert len(reader.header_digest()) == 32


def test_digest_depends_on_the_structure(form: str, tmp_path: Path) -> None:
    digests = set()
    for name in ("llama", "llama-f16"):
        folder = tmp_path / name
        folder.mkdir()
        with open_checkpoint(FORMS[form](MODELS[name], folder)) as reader:
            digests.add(reader.header_digest())
    assert len(digests) == 2


def test_all_descriptors_are_closed(source: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with open_checkpoint(source) as reader:
        reader.read(reader.names()[0])
        assert len(os.listdir("/proc/self/fd")) > len(before)
    assert os.listdir("/proc/self/fd") == before


def test_a_name_tells_nothing_about_the_form(form: str, source: Path) -> None:
    if source.is_file():
        renamed = source.rename(source.with_name("model.xyz"))
        with open_checkpoint(renamed) as reader:
            assert sorted(reader.names()) == sorted(hf_weights(MODELS["llama"]))


@pytest.mark.parametrize("form", SINGLE_FILES)
def test_a_truncated_file_is_a_file_error(form: str, source: Path) -> None:
    whole = source.read_bytes()
    before = os.listdir("/proc/self/fd")
    for length in (len(whole) - 64, len(whole) // 2, 2000, 100, 40):
        source.write_bytes(whole[:length])
        with pytest.raises(FileError, match=source.name):
            open_checkpoint(source)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("form", SINGLE_FILES)
def test_a_file_that_shrinks_after_opening_is_a_file_error(form: str, source: Path) -> None:
    with open_checkpoint(source) as reader:
        os.truncate(source, source.stat().st_size // 4)
        with pytest.raises(FileError, match=r"truncated: .*norm\.weight has \d+ bytes .* 0 of them are there"):
            reader.read("model.norm.weight")


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "gguf"])
def test_damage_never_ends_in_a_traceback(suffix: str, tmp_path: Path) -> None:
    """Spoil the bytes of the structure in turn: the reader works on or names the problem."""
    source = write_small(tmp_path / f"small.{suffix}")
    whole = source.read_bytes()
    for position in range(0, min(len(whole), 3000), 2):
        damaged = bytearray(whole)
        damaged[position] ^= (0xFF, 0x80, 0x01)[position % 3]
        source.write_bytes(damaged)
        with contextlib.suppress(JobError), open_checkpoint(source) as reader:
            for name in reader.names():
                reader.read(name)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_every_dtype(code: str, suffix: str, tmp_path: Path) -> None:
    dtype = DTYPES[code]
    elements = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    weights = {
        "matrix": elements.view(dtype).reshape(3, 5),
        "scalar": elements[: dtype.itemsize].clone().view(dtype).reshape(()),
        "empty": torch.empty((0, 4), dtype=dtype),
    }
    path = tmp_path / f"weights.{suffix}"
    safetensors.torch.save_file(weights, path) if suffix == "safetensors" else torch.save(weights, path)
    with open_checkpoint(path) as reader:
        for name, tensor in weights.items():
            assert bits_equal(reader.read(name), tensor), name


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_stack_of_linear_layers_is_shown_as_it_is(suffix: str, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    weights = layers.state_dict() | {f"layers.{name}": tensor + 1 for name, tensor in layers.state_dict().items()}
    path = tmp_path / f"mlp.{suffix}"
    safetensors.torch.save_file(weights, path) if suffix == "safetensors" else torch.save(weights, path)
    with open_checkpoint(path) as reader:
        assert sorted(reader.names()) == sorted(weights)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer.*git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (b"just some text", "no checkpoint.*b'just som'.*safetensors"),
        (b"", "no checkpoint"),
    ],
)
def test_other_files_are_refused_by_what_they_are(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        open_checkpoint(path)


def test_a_missing_path_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nowhere.*No such file"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_memory_is_bounded_by_the_largest_tensor(suffix: str, tmp_path: Path) -> None:
    """512 MiB in tensors of 64 MiB: the process grows by no more than two of them."""
    path = tmp_path / f"large.{suffix}"
    write_large(path, tensors=8, mebibytes=64)
    script = (
        "import resource, sys\n"
        "from sharder.formats import open_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak()\n"
        "with open_checkpoint(sys.argv[1]) as reader:\n"
        "    for name in reader.names():\n"
        "        reader.read(name)\n"
        "print(peak() - before)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(process.stdout) < 2 * 64


def write_small(path: Path) -> Path:
    """Write a checkpoint that is mostly structure."""
    weights = {"norm.weight": torch.randn(3), "embed.weight": torch.randn(2, 3).t()}
    if path.suffix == ".gguf":
        return write_gguf(tiny_model("llama-tied-biases"), path)
    if path.suffix == ".pt":
        torch.save({"model": weights, "config": {"hidden_size": 3}}, path)
    else:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return path


def write_large(path: Path, tensors: int, mebibytes: int) -> None:
    """Write a file with holes for data, which take no room on disk."""
    size = mebibytes << 20
    if path.suffix == ".safetensors":
        entries = {
            f"{index}.weight": {
                "dtype": "F16",
                "shape": [size // 2],
                "data_offsets": [index * size, (index + 1) * size],
            }
            for index in range(tensors)
        }
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + tensors * size)
    else:
        weights = {f"{index}.weight": torch.empty(size // 2, dtype=torch.float16) for index in range(tensors)}
        with torch.serialization.skip_data():
            torch.save(weights, path)
