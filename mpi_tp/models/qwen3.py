"""Qwen3: Llama with an RMSNorm on every head of q and k, and a head_dim of its own."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig
from mpi_tp.models.qwen2 import QWEN_DEFAULTS, refuse_mixed_windows
from mpi_tp.models.transformer_config import parse_transformer


def parse_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face Qwen3 `config`."""
    refuse_mixed_windows(config)
    attention_bias = Fields(config).flag("attention_bias", False)
    return parse_transformer(
        {**QWEN_DEFAULTS, "head_dim": 128, **config},
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
