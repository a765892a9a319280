"""Mistral: Llama without biases, with a sliding window in its first release."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig
from mpi_tp.models.transformer_config import parse_transformer


def parse_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face Mistral `config`; without a `sliding_window` of its own it has 4096."""
    config = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, **config}
    fields = Fields(config)
    window = None if fields.optional("sliding_window") is None else fields.integer("sliding_window")
    return parse_transformer(config, attention_bias=False, output_bias=False, sliding_window=window)
