"""Configs are read as transformers reads them, and what it would honour and we would not is refused by name."""

from typing import Any

import pytest
import transformers

from mpi_tp.config import MLPConfig, ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.models.families import parse_config
from tests.support.tiny import AWKWARD

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MLP = {
    "model_type": "mlp",
    "layer_names": ["0", "2"],
    "layer_sizes": [4, 8, 3],
    "layer_biases": [True, False],
    "activation": "relu",
}


def parse(model_type: str, **changes: Any) -> ModelConfig:
    parsed = parse_config({"model_type": model_type, **AWKWARD, **changes})
    assert isinstance(parsed, ModelConfig)
    return parsed


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_as_in_transformers(model_type: str) -> None:
    required = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    given = {name: AWKWARD[name] for name in required} | {"num_attention_heads": 32, "hidden_size": 64}
    expected = transformers.AutoConfig.for_model(model_type, **given)
    parsed = parse_config({"model_type": model_type, **given})
    assert isinstance(parsed, ModelConfig)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(parsed, name) == getattr(expected, name), name
    assert parsed.rope_theta == expected.rope_parameters["rope_theta"]
    assert parsed.head_dim == getattr(expected, "head_dim", 2)
    assert parsed.sliding_window == getattr(expected, "sliding_window", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5.0},
        {"rope_scaling": LLAMA3, "rope_theta": 5.0},
        {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0, "partial_rotary_factor": 1.0},
    ],
)
def test_rotary_parameters_in_both_spellings(changes: dict[str, Any]) -> None:
    expected = transformers.LlamaConfig(**AWKWARD, **changes).rope_parameters
    parsed = parse("llama", **changes)
    assert parsed.rope_theta == expected["rope_theta"]
    found = ("default", None) if parsed.rope_scaling is None else vars(parsed.rope_scaling).values()
    names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name, value in zip(names, found, strict=False):
        assert name not in expected or expected[name] == value, name


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear': it must be an object"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn"}},
        "rope_type is 'yarn': it must be one of default, linear, llama3",
    ),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "by layer type"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ("llama", {"eos_token_id": "2"}, "eos_token_id is '2'"),
    ("llama", {"eos_token_id": [2, 3.5]}, "eos_token_id is"),
    ("llama", {"eos_token_id": True}, "eos_token_id is True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': it must be one of silu, swish"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config asks for fp8"),
    ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention': it must be a list"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is true"),
    ("llama", {"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000: it must be at most 10000"),
    ("llama", {"num_attention_heads": 10**8}, "num_attention_heads is 100000000: it must be at most 65536"),
    ("llama", {"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000: it must be at most"),
    ("llama", {"vocab_size": 10**15}, "vocab_size is 1000000000000000: it must be at most 2147483647"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta is inf: it must be a number"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*: it must be a number"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_is_not_implemented_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(model_type, **changes)


def test_layer_types_of_full_attention_are_taken() -> None:
    assert parse("qwen3", layer_types=["full_attention"] * 2).sliding_window is None


@pytest.mark.parametrize(("entry", "expected"), [(None, ()), (0, (0,)), ([2, 7], (2, 7))])
def test_ids_that_end_a_sequence(entry: Any, expected: tuple[int, ...]) -> None:
    assert parse("llama", eos_token_id=entry).eos_token_ids == expected


def test_a_stack_of_linear_layers() -> None:
    assert parse_config(MLP) == MLPConfig(("0", "2"), (4, 8, 3), (True, False), "relu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_names": None}, "layer_names is missing"),
        ({"layer_names": "0"}, "layer_names is '0': it must be a list"),
        ({"layer_names": [0, 2]}, r"layer_names\[0\] is 0: it must be text"),
        ({"layer_names": []}, "0 layer_names go with 3 layer_sizes"),
        ({"layer_sizes": [4, 8]}, "2 layer_names go with 2 layer_sizes and 2 layer_biases"),
        ({"layer_sizes": [4, 8, "3"]}, r"layer_sizes\[2\] is '3'"),
        ({"layer_sizes": [4, 0, 3]}, r"layer_sizes\[1\] is 0"),
        ({"layer_biases": [True]}, "and 1 layer_biases"),
        ({"layer_biases": [True, 1]}, r"layer_biases\[1\] is 1: it must be true or false"),
        ({"activation": "elu"}, "activation is 'elu': it must be one of relu, gelu, silu, tanh, none"),
        ({"activation": None}, "activation is missing"),
    ],
)
def test_a_broken_config_of_linear_layers_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config({**MLP, **changes})
