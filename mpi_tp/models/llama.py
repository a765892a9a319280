"""Llama 1, 2 and 3, SmolLM2 and what else calls itself `llama`."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig
from mpi_tp.models.transformer_config import parse_transformer


def parse_llama(config: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face Llama `config`; `attention_bias` there covers o_proj too."""
    fields = Fields(config)
    attention_bias = fields.flag("attention_bias", False)
    return parse_transformer(
        config,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
