"""Source names matched to the family's table."""

import re

import pytest

from mpi_tp.errors import ConfigurationError
from sharder.names import canonical_names

LLAMA = re.compile(r"lm_head\.weight|model\.(embed_tokens|norm|layers\.\d+\.self_attn\.[qkvo]_proj)\.weight")
MLP = re.compile(r"(layers\.)?\d+\.(weight|bias)")
CANONICAL = "model.layers.0.self_attn.q_proj.weight"


def is_llama(name: str) -> bool:
    return LLAMA.fullmatch(name) is not None


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "model.",
        "module.model.",
        "_orig_mod.model.",
        "module._orig_mod.model.",
        "_orig_mod.module.model.",
        "_orig_mod._orig_mod.module.module.model.",
        "model._orig_mod.",
        "model.model.",
        "module.",
        "_orig_mod.",
    ],
)
def test_prefixes_in_any_order_and_number(prefix: str) -> None:
    name = f"{prefix}layers.0.self_attn.q_proj.weight"
    assert canonical_names([name], is_llama) == {name: CANONICAL}


def test_layers_compiled_one_by_one() -> None:
    name = "model.layers.0._orig_mod.self_attn.q_proj.weight"
    assert canonical_names([name], is_llama) == {name: CANONICAL}


@pytest.mark.parametrize("name", ["lm_head.weight", "module.lm_head.weight", "model.lm_head.weight"])
def test_a_name_without_model_prefix_in_the_table(name: str) -> None:
    assert canonical_names([name], is_llama) == {name: "lm_head.weight"}


def test_known_names_stay_in_order() -> None:
    names = ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]
    assert list(canonical_names(names, is_llama).items()) == [(name, name) for name in names]


def test_a_stack_of_linear_layers() -> None:
    names = ["0.weight", "module.2.bias", "layers.4.weight"]
    targets = ["0.weight", "2.bias", "layers.4.weight"]
    assert list(canonical_names(names, lambda name: MLP.fullmatch(name) is not None).values()) == targets


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.weight",
        "encoder.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.module.self_attn.q_proj.weight",
        "my_rotary_emb.inv_freq",
        "rotary_emb.inv_freq.weight",
        "modelnorm.weight",
        "",
    ],
)
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor {re.escape(name)} is not one of this model family"):
        canonical_names(["lm_head.weight", name], is_llama)


def test_an_ambiguous_name_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"module\.norm\.weight could be norm\.weight or model\.norm\.weight"):
        canonical_names(["module.norm.weight"], {"norm.weight", "model.norm.weight"}.__contains__)


def test_two_sources_of_one_tensor_are_both_named() -> None:
    with pytest.raises(ConfigurationError, match=r"norm\.weight and module\.model\.norm\.weight are both model\.norm"):
        canonical_names(["norm.weight", "module.model.norm.weight"], is_llama)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "h.0.attn.masked_bias"],
)
def test_computed_buffers_are_left_out(name: str) -> None:
    assert canonical_names([name, "lm_head.weight"], is_llama) == {"lm_head.weight": "lm_head.weight"}


def test_a_non_weight_that_the_family_knows_is_kept() -> None:
    assert canonical_names(["rotary_emb.inv_freq"], lambda name: True) == {"rotary_emb.inv_freq": "rotary_emb.inv_freq"}
