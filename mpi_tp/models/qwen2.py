"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.models.transformer_config import parse_transformer

QWEN_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 32, "max_position_embeddings": 32768}


def parse_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face Qwen2 `config`."""
    refuse_mixed_windows(config)
    return parse_transformer({**QWEN_DEFAULTS, **config}, attention_bias=True, output_bias=False)


def refuse_mixed_windows(config: Mapping[str, Any]) -> None:
    """Refuse a Qwen `config` in which only some layers use a sliding window."""
    fields = Fields(config)
    types = fields.texts("layer_types") if fields.optional("layer_types") is not None else ()
    if others := set(types) - {"full_attention"}:
        raise ConfigurationError(
            f"config: layer_types has {', '.join(sorted(others))}: only full_attention is implemented"
        )
    if fields.flag("use_sliding_window", False):
        raise ConfigurationError(
            f"config: use_sliding_window is true in a {config['model_type']} model: a window on some layers only "
            "is not implemented; set it to false if your prompts stay below sliding_window"
        )
