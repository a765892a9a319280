"""The model families by `model_type`: how each config is parsed and which tensors it has. No modules, no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpi_tp.config import MLPConfig, ModelConfig
from mpi_tp.errors import ConfigurationError
from mpi_tp.models.llama import parse_llama
from mpi_tp.models.mistral import parse_mistral
from mpi_tp.models.mlp import mlp_table, parse_mlp
from mpi_tp.models.qwen2 import parse_qwen2
from mpi_tp.models.qwen3 import parse_qwen3
from mpi_tp.models.transformer_table import transformer_table
from mpi_tp.partition.plan import TensorRow


@dataclass(frozen=True)
class Family:
    """How one family's config is parsed and what its checkpoint holds."""

    parse: Callable[[Mapping[str, Any]], Any]
    table: Callable[[Any], list[TensorRow]]


FAMILIES: Mapping[str, Family] = {
    "llama": Family(parse_llama, transformer_table),
    "mistral": Family(parse_mistral, transformer_table),
    "qwen2": Family(parse_qwen2, transformer_table),
    "qwen3": Family(parse_qwen3, transformer_table),
    "mlp": Family(parse_mlp, mlp_table),
}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face `config`.

    Raises ConfigurationError naming the architecture and ours if it is none of them.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        named = config.get("architectures") or model_type
        raise ConfigurationError(f"model_type {model_type!r} ({named}) is not supported: we have {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def parse_config(config: Mapping[str, Any]) -> ModelConfig | MLPConfig:
    """Return the parsed config; ConfigurationError if it is incomplete, contradictory or of no family of ours."""
    parsed: ModelConfig | MLPConfig = find_family(config).parse(config)
    return parsed


def tensor_table(config: Mapping[str, Any]) -> list[TensorRow]:
    """Return the rows of every tensor that a checkpoint with this `config` holds."""
    family = find_family(config)
    return family.table(family.parse(config))
