"""Checkpoints become shard sets whose parts join to the checkpoint bit for bit, at every rank count."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mpi_tp.errors import ConfigurationError, FileError, UsageError
from mpi_tp.partition.plan import STRATEGIES, Strategy
from mpi_tp.shards.join import open_joiner
from mpi_tp.shards.reader import ShardSet
from sharder import Sharder
from tests.support.checkpoints import FORMS, bits_equal, write_model_and_config, write_state_dict
from tests.support.engines import save_tokenizer
from tests.support.parallel import slice_for
from tests.support.shards import contents
from tests.support.tiny import hf_config, hf_weights, tiny_model

MODELS = {name: tiny_model(name, torch.bfloat16) for name in ("llama", "llama-tied-biases", "qwen2", "qwen3")}
LLAMA = MODELS["llama"]
MLP = {
    "0.weight": torch.randn(48, 20),
    "0.bias": torch.randn(48),
    "2.weight": torch.randn(33, 48),
    "4.weight": torch.randn(7, 33),
    "4.bias": torch.randn(7),
}


def check_set(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """The set holds exactly these tensors, and each rank's part is its slice."""
    shards = ShardSet.open(directory)
    assert set(shards.plan) == set(expected)
    with open_joiner(shards) as joiner:
        for name, entry in shards.manifest.tensors.items():
            assert bits_equal(joiner.join(entry), expected[name]), name
        for file in joiner.files:
            for name, planned in shards.plan.items():
                assert bits_equal(file.read(name), slice_for(planned, expected[name], file.rank)), name


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None) -> Path:
    torch.save({"model": tensors, "config": config} if config else tensors, folder / "base.pt")
    return folder / "base.pt"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_transformers(tmp_path: Path, name: str, ranks: int, strategy: Strategy) -> None:
    source = write_model_and_config(MODELS[name], tmp_path)
    if ranks > MODELS[name].config.num_attention_heads:
        with pytest.raises(ConfigurationError, match="over 4 ranks at most, not 5: use --ranks 4 or fewer"):
            Sharder(source, ranks, tmp_path / "shards").run()
        return
    Sharder(source, ranks, tmp_path / "shards", strategy).run()
    check_set(tmp_path / "shards", hf_weights(MODELS[name]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_a_stack_of_linear_layers(tmp_path: Path, ranks: int, strategy: Strategy) -> None:
    source = save(tmp_path, MLP, None)
    report = Sharder(source, ranks, tmp_path / "shards", strategy, activation="gelu").run()
    assert report.shards.config["activation"] == "gelu"
    assert not report.lacks_tokenizer
    check_set(tmp_path / "shards", MLP)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_source(tmp_path: Path, form: str) -> None:
    source = FORMS[form](LLAMA, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(LLAMA)))
    Sharder(source, 3, tmp_path / "shards").run()
    check_set(tmp_path / "shards", hf_weights(LLAMA))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_casting(tmp_path: Path, dtype: Any) -> None:
    Sharder(write_model_and_config(LLAMA, tmp_path), 2, tmp_path / "shards", dtype=dtype).run()
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in hf_weights(LLAMA).items()}
    check_set(tmp_path / "shards", expected)


def test_the_source_keeps_the_dtype_of_each_tensor(tmp_path: Path) -> None:
    tensors = dict(hf_weights(LLAMA))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    Sharder(save(tmp_path, tensors, hf_config(LLAMA)), 2, tmp_path / "shards").run()
    check_set(tmp_path / "shards", tensors)


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = dict(hf_weights(LLAMA))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][3, 4] = 1e5
    source = save(tmp_path, tensors, hf_config(LLAMA))
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight holds 99840, too large for float16"):
        Sharder(source, 2, tmp_path / "shards", dtype="float16").run()
    assert not (tmp_path / "shards").exists()


def test_values_that_float32_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = {name: tensor.double() for name, tensor in hf_weights(LLAMA).items()}
    tensors["model.norm.weight"][0] = float("inf")
    tensors["model.norm.weight"][1] = 1e300
    source = save(tmp_path, tensors, hf_config(LLAMA))
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigurationError, match=rf"model\.norm\.weight holds 1e\+300, too large for {dtype}"):
            Sharder(source, 2, tmp_path / "shards", dtype=dtype).run()  # type: ignore[arg-type]


def test_8_bit_floats_are_cast(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in hf_weights(LLAMA).items()}
    Sharder(save(tmp_path, tensors, hf_config(LLAMA)), 2, tmp_path / "shards", dtype="bfloat16").run()
    check_set(tmp_path / "shards", {name: tensor.bfloat16() for name, tensor in tensors.items()})


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    """The Llama's tensors with some replaced, added or, by None, left out; `__` stands for a dot."""
    tensors: dict[str, Any] = {
        **hf_weights(LLAMA),
        **{name.replace("__", "."): tensor for name, tensor in changes.items()},
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


REFUSED = {
    "unknown": (changed(model__layers__0__moe__weight=torch.ones(3)), r"tensor model\.layers\.0\.moe\.weight is not"),
    "missing": (changed(model__norm__weight=None), r"has no tensor model\.norm\.weight"),
    "layer too many": (changed(model__layers__2__input_layernorm__weight=torch.ones(60)), r"model\.layers\.2\.input"),
    "shape": (changed(model__norm__weight=torch.ones(61)), r"model\.norm\.weight has shape \[61\].* \[60\]"),
    "dtype": (changed(model__norm__weight=torch.ones(60, dtype=torch.complex64)), r"model\.norm\.weight is complex64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_the_config(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message):
        Sharder(save(tmp_path, tensors, hf_config(LLAMA)), 2, tmp_path / "shards").run()
    assert not (tmp_path / "shards").exists()


def test_rotary_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    tensors = changed(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    Sharder(save(tmp_path, tensors, hf_config(LLAMA)), 2, tmp_path / "shards").run()
    check_set(tmp_path / "shards", hf_weights(LLAMA))


def test_a_tied_head_that_is_stored_again_is_left_out_if_it_is_the_same(tmp_path: Path) -> None:
    tied = MODELS["qwen2"]
    tensors = dict(hf_weights(tied))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    Sharder(save(tmp_path, tensors, hf_config(tied)), 2, tmp_path / "shards").run()
    check_set(tmp_path / "shards", hf_weights(tied))
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        Sharder(save(tmp_path, tensors, hf_config(tied)), 2, tmp_path / "other").run()


def test_an_architecture_that_is_not_ours_is_named_with_ours(tmp_path: Path) -> None:
    config = {**hf_config(LLAMA), "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    with pytest.raises(ConfigurationError, match=r"GPT2LMHeadModel.* llama, mistral, qwen2, qwen3"):
        Sharder(save(tmp_path, hf_weights(LLAMA), config), 2, tmp_path / "shards").run()


def test_where_the_config_comes_from(tmp_path: Path) -> None:
    source = write_state_dict(LLAMA, tmp_path)
    with pytest.raises(ConfigurationError, match=r"no config\.json inside or beside it: pass --model-config"):
        Sharder(source, 2, tmp_path / "shards").run()
    named = tmp_path / "named.json"
    named.write_text(json.dumps({**hf_config(LLAMA), "rope_theta": 7.0}))
    assert Sharder(source, 2, tmp_path / "a", model_config=named).run().shards.config["rope_theta"] == 7.0
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(LLAMA), "rope_theta": 8.0}))
    assert Sharder(source, 2, tmp_path / "b").run().shards.config["rope_theta"] == 8.0
    assert Sharder(source, 2, tmp_path / "c", model_config=named).run().shards.config["rope_theta"] == 7.0


def test_the_activation_is_required_for_linear_layers_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--activation relu\|gelu\|silu\|tanh\|none"):
        Sharder(save(tmp_path, MLP, None), 2, tmp_path / "shards").run()
    with pytest.raises(UsageError, match="--activation is for a plain stack of linear layers"):
        Sharder(write_model_and_config(LLAMA, tmp_path), 2, tmp_path / "shards", activation="relu").run()


def test_an_mlp_has_at_most_as_many_ranks_as_its_narrowest_layer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="over 7 ranks at most, not 8"):
        Sharder(save(tmp_path, MLP, None), 8, tmp_path / "shards", activation="relu").run()


@pytest.mark.parametrize("wrong", [{"device_count": 0}, {"strategy": "rows"}, {"dtype": "int8"}, {"activation": "elu"}])
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
        Sharder(**{"model_path": "base.pt", "device_count": 2, **wrong})


def test_the_same_again_is_found_and_something_else_refused(tmp_path: Path) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    target = tmp_path / "shards"
    assert not Sharder(source, 2, target).run().found
    before = contents(target)
    source = source.rename(tmp_path / "renamed.pt")
    assert Sharder(source, 2, target).run().found
    others: list[dict[str, Any]] = [{"device_count": 3}, {"strategy": "paired"}, {"dtype": "float32"}]
    for other in others:
        with pytest.raises(ConfigurationError, match="already holds another shard set"):
            Sharder(**{"model_path": source, "device_count": 2, "output_dir": target, **other}).run()
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigurationError, match="already holds another shard set"):
        Sharder(source, 2, target).run()
    assert contents(target) == before
    assert not Sharder(source, 2, target, overwrite=True).run().found
    assert "tokenizer/tokenizer.json" in contents(target)


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    Sharder(source, 3, tmp_path / "a", "paired").run()
    Sharder(source, 3, tmp_path / "b", "paired").run()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_verify_source_sees_new_values_under_the_old_header(tmp_path: Path) -> None:
    tensors = dict(hf_weights(LLAMA))
    source, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(LLAMA)))
    safetensors.torch.save_file(tensors, source)
    Sharder(source, 2, tmp_path / "shards").run()
    assert Sharder(source, 2, tmp_path / "shards", verify_source=True).run().found
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    safetensors.torch.save_file(tensors, source)
    assert Sharder(source, 2, tmp_path / "shards").run().found
    with pytest.raises(ConfigurationError, match=r"another .*model\.safetensors: tensor model\.norm\.weight differs"):
        Sharder(source, 2, tmp_path / "shards", verify_source=True).run()


def test_a_damaged_set_is_not_called_finished(tmp_path: Path) -> None:
    source = write_model_and_config(LLAMA, tmp_path)
    Sharder(source, 2, tmp_path / "shards").run()
    (tmp_path / "shards" / "rank-00001-of-00002.h5").unlink()
    with pytest.raises(FileError, match=r"rank-00001-of-00002\.h5"):
        Sharder(source, 2, tmp_path / "shards").run()
    assert not Sharder(source, 2, tmp_path / "shards", overwrite=True).run().found
