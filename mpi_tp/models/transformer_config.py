"""What the config parsers of the transformer families share."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig, RopeScaling
from mpi_tp.errors import ConfigurationError

ROPE_TYPES = ("default", "linear", "llama3")


def parse_transformer(
    config: Mapping[str, Any],
    *,
    attention_bias: bool,
    output_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face `config` whose family decides the keyword arguments.

    Raises ConfigurationError for missing or contradictory fields and for variants that are not implemented.
    """
    fields = Fields(config)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    _require_silu(config)
    rope_theta, rope_scaling = _parse_rope(config)
    return ModelConfig(
        model_type=str(config["model_type"]),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        eos_token_ids=_eos_token_ids(config),
    )


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.optional("head_dim") is None and hidden_size % num_heads:
        raise ConfigurationError(
            f"config: num_attention_heads {num_heads} does not divide hidden_size {hidden_size} and head_dim is missing"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigurationError(f"config: head_dim is {head_dim}: rotary embeddings need an even one")
    return head_dim


def _require_silu(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigurationError(
            f"config: hidden_act is {activation!r}: {config['model_type']} models run with silu only"
        )


def _parse_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read both spellings: `rope_theta` beside `rope_scaling`, and one `rope_parameters` that holds all."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields = Fields({"rope_theta": config.get("rope_theta"), **rope})
    theta = fields.number("rope_theta", 10000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigurationError(f"config: rope_type {rope_type!r} is not implemented: we have {', '.join(ROPE_TYPES)}")
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling("linear", fields.number("factor"))
    return theta, RopeScaling(
        "llama3",
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
