"""verify notices every flipped bit; merge gives the checkpoint back; inspect shows the right numbers."""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.shards import rank_file
from mpi_tp.shards.checksum import tensor_checksum
from mpi_tp.shards.reader import ShardSet
from sharder import Sharder
from sharder.inspect import cache_bytes, describe
from sharder.merge import merge
from sharder.verify import verify
from tests.support.checkpoints import bits_equal, write_model_and_config
from tests.support.engines import save_tokenizer
from tests.support.shards import contents, flip, forged
from tests.support.tiny import hf_config, hf_weights, tiny_model

MODEL = tiny_model("llama", torch.bfloat16)
KEY = "model.layers.1.self_attn.k_proj.weight"
NUM_FLIPS = 200


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("some content")
    return write_model_and_config(MODEL, folder)


@pytest.fixture
def shards(source: Path, tmp_path: Path) -> Path:
    Sharder(source, 3, tmp_path / "shards").run()
    return tmp_path / "shards"


def owner_of(shards: ShardSet, file: str, offset: int) -> str | None:
    """What a message must name for the byte at `offset` of a rank file: a tensor and its rank."""
    ranks = {entry.name: rank for rank, entry in enumerate(shards.manifest.files)}
    if file not in ranks:
        return None
    with shards.open_rank(ranks[file]) as opened:
        for part in opened.tensors.values():
            if part.offset <= offset < part.offset + part.num_bytes:
                return f"tensor {part.name} of rank {ranks[file]}"
    return None


def test_a_flipped_bit_anywhere_in_the_set_is_noticed(shards: Path) -> None:
    sizes = {name: len(content) for name, content in contents(shards).items()}
    generator = random.Random(20)
    opened = ShardSet.open(shards)
    inside = 0
    for file in generator.choices(sorted(sizes), k=NUM_FLIPS):
        offset = generator.randrange(sizes[file])
        owner = owner_of(opened, file, offset)
        mask = 1 << generator.randrange(8)
        flip(shards / file, offset, mask)
        with pytest.raises(FileError) as failure:
            verify(shards)
        assert file in str(failure.value)
        assert owner is None or owner in str(failure.value), f"{file} byte {offset}: {failure.value}"
        inside += owner is not None
        flip(shards / file, offset, mask)
    assert inside > NUM_FLIPS / 10, "too few flips hit a tensor"
    verify(shards)


def test_a_file_that_crashes_the_hdf5_library_is_reported(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged structure can, by what the fuzzer found; here the process that looks at it is killed."""
    monkeypatch.setattr(rank_file, "read_structure", lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(FileError, match=r"is forged: the HDF5 library crashed on its structure \(SIGSEGV\)"):
        verify(shards)


def test_a_set_equals_its_source_and_no_other(shards: Path, source: Path, tmp_path: Path) -> None:
    verify(shards, source)
    tensors = dict(hf_weights(MODEL))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    torch.save({"model": tensors, "config": hf_config(MODEL)}, tmp_path / "other.pt")
    with pytest.raises(ConfigurationError, match=r"another .*other\.pt: tensor model\.norm\.weight differs"):
        verify(shards, tmp_path / "other.pt")


def test_a_cast_set_equals_its_source_cast(source: Path, tmp_path: Path) -> None:
    Sharder(source, 2, tmp_path / "shards", "paired", dtype="float32").run()
    verify(tmp_path / "shards", source)


def test_a_stack_of_linear_layers_equals_its_source(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.randn(8, 4), "2.weight": torch.randn(6, 8)}, tmp_path / "mlp.pt")
    Sharder(tmp_path / "mlp.pt", 3, tmp_path / "shards", activation="relu").run()
    verify(tmp_path / "shards", tmp_path / "mlp.pt")


def test_ranks_that_disagree_on_a_shared_head_are_noticed(shards: Path) -> None:
    """Each part is sound by its own checksum, as if two runs had been mixed by somebody who mends digests."""
    with ShardSet.open(shards).open_rank(1) as file:
        part, entry = file.read(KEY), file.tensors[KEY]
    part[0, 0] += 1
    with (shards / "rank-00001-of-00003.h5").open("r+b") as raw:
        raw.seek(entry.offset)
        raw.write(part.view(torch.uint8).numpy().tobytes())
    with forged(shards, 1) as h5:
        h5[KEY].attrs.modify("xxh3_128", np.bytes_(tensor_checksum(part)))
    with pytest.raises(FileError, match=rf"rank-00001-of-00003\.h5: tensor {KEY} of rank 1 differs from what lower"):
        verify(shards)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_merging_gives_the_checkpoint_back(shards: Path, source: Path, tmp_path: Path, ending: str) -> None:
    output = tmp_path / "merged" / f"base{ending}"
    output.parent.mkdir()
    merge(shards, output)
    if ending == ".pt":
        saved = torch.load(output, weights_only=True)
        tensors, config = saved["model"], saved["config"]
    else:
        tensors = safetensors.torch.load_file(output)
        config = json.loads((output.parent / "config.json").read_text())
    assert tensors.keys() == hf_weights(MODEL).keys()
    assert all(bits_equal(tensors[name], tensor) for name, tensor in hf_weights(MODEL).items())
    assert config == json.loads(json.dumps(hf_config(MODEL)))
    report = Sharder(output, 3, tmp_path / "again").run()
    assert report.shards.set_id == ShardSet.open(shards).set_id
    assert report.shards.manifest.tokenizer == ShardSet.open(shards).manifest.tokenizer


def test_merged_safetensors_keep_their_tensors_aligned(shards: Path, tmp_path: Path) -> None:
    merge(shards, tmp_path / "base.safetensors")
    with (tmp_path / "base.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0


def test_merging_writes_over_no_other_model(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("another")
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json belongs to another model"):
        merge(shards, tmp_path / "base.pt")
    assert contents(tmp_path) == before


def test_a_file_beside_the_output_that_cannot_be_read_is_named(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(FileError, match=r"tokenizer\.json cannot be read: Is a directory"):
        merge(shards, tmp_path / "base.pt")


def test_merging_a_damaged_set_leaves_no_file(shards: Path, tmp_path: Path) -> None:
    with ShardSet.open(shards).open_rank(2) as file:
        offset = file.tensors["lm_head.weight"].offset
    flip(shards / "rank-00002-of-00003.h5", offset)
    before = contents(tmp_path)
    for name in ("base.pt", "base.safetensors"):
        with pytest.raises(FileError, match=r"tensor lm_head\.weight of rank 2"):
            merge(shards, tmp_path / name)
    assert contents(tmp_path) == before


def test_merging_needs_a_known_ending_and_a_folder(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end with \.safetensors or \.pt"):
        merge(shards, tmp_path / "base.gguf")
    with pytest.raises(FileError, match="No such file"):
        merge(shards, tmp_path / "nowhere" / "base.pt")


def test_inspect_shows_ranges_bytes_and_cache(shards: Path) -> None:
    opened = ShardSet.open(shards)
    lines = describe(opened)
    rows = {line.split()[0]: " ".join(line.split()) for line in lines if line}
    query = "60 x 60 0 0:24 (2,880) 24:48 (2,880) 48:60 (1,440)"
    assert rows["model.layers.0.self_attn.q_proj.weight"].endswith(query)
    assert rows["model.layers.0.self_attn.k_proj.weight"].endswith("12 x 60 0" + " 0:12 (1,440)" * 3)
    assert rows["model.norm.weight"].endswith("bfloat16 60 -" + " whole (120)" * 3)
    files = [opened.open_rank(rank) for rank in range(3)]
    by_rank = [sum(part.num_bytes for part in file.tensors.values()) for file in files]
    for file in files:
        file.close()
    # 2 layers, keys and values, one shared head of 12 features, 1,000 tokens
    numbers = 2 * 2 * 12 * 1000
    assert [cache_bytes(opened, rank, 1000, torch.bfloat16) for rank in range(3)] == [numbers * 2] * 3
    [titles] = [line for line in lines if line.startswith("rank ")]
    assert titles.endswith("KV cache per 1,000 tokens, CPU (float32)  KV cache per 1,000 tokens, GPU (bfloat16)")
    for rank, weights in enumerate(by_rank):
        for size in (numbers * 4, numbers * 2):
            assert f"{size / 1e6:.1f} MB ({(weights + size) / 1e6:.1f} MB together)" in rows[str(rank)]
    assert f"balance {max(by_rank) / (sum(by_rank) / 3):.3f}" in lines[-1]


def test_inspect_of_linear_layers_has_no_cache(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.randn(8, 4)}, tmp_path / "mlp.pt")
    report = Sharder(tmp_path / "mlp.pt", 2, tmp_path / "shards", activation="none").run()
    assert cache_bytes(report.shards, 0, 1000, torch.float32) == 0
    assert "0.weight" in "\n".join(describe(report.shards))
