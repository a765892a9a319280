"""What the config parsers of the transformer families share."""

from collections.abc import Mapping
from typing import Any

from mpi_tp.config import Fields, ModelConfig, RopeScaling
from mpi_tp.errors import ConfigurationError

ROPE_TYPES = ("default", "linear", "llama3")
MAX_LAYERS = 10_000
MAX_HEADS = 65_536
MAX_POSITIONS = 1 << 26
"""Far above any model: a table of tensors, of ranks or of rotary angles is made of so many entries."""
SILU = ("silu", "swish")  # two names of one function


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
    fields.choice("hidden_act", SILU, "silu")
    _refuse_quantised(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", maximum=MAX_HEADS)
    rope_theta, rope_scaling = _parse_rope(fields)
    return ModelConfig(
        model_type=str(config["model_type"]),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=_num_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, MAX_POSITIONS),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        eos_token_ids=_eos_token_ids(fields),
    )


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.optional("head_dim") is None and hidden_size % num_heads:
        raise ConfigurationError(
            f"config: num_attention_heads {num_heads} does not divide hidden_size {hidden_size} and head_dim is missing"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigurationError(f"config: head_dim is {head_dim}: rotary embeddings need an even one")
    return head_dim


def _refuse_quantised(fields: Fields) -> None:
    method = fields.section("quantization_config").get("quant_method")
    if fields.section("quantization_config"):
        raise ConfigurationError(
            f"config: quantization_config asks for {method}: quantised checkpoints are taken as GGUF only; shard the "
            "model's unquantised weights, or a .gguf file"
        )


def _parse_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Read both spellings: `rope_theta` beside `rope_scaling`, and one `rope_parameters` that holds all."""
    own = fields.section("rope_scaling") or fields.section("rope_parameters")
    outer = {name: fields.optional(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = Fields({**outer, **own, "rope_type": own.get("rope_type", own.get("type"))})
    if any(isinstance(value, dict) for value in own.values()):
        raise ConfigurationError(f"config: rotary parameters by layer type ({', '.join(own)}) are not implemented")
    if (share := rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigurationError(f"config: partial_rotary_factor is {share}: only 1, whole heads, is implemented")
    return rope.number("rope_theta", 10000.0), _parse_scaling(rope)


def _parse_scaling(rope: Fields) -> RopeScaling | None:
    rope_type = rope.choice("rope_type", ROPE_TYPES, "default")
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling("linear", rope.number("factor"))
    return RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    entry = fields.optional("eos_token_id")
    ids = entry if isinstance(entry, list | tuple) else [] if entry is None else [entry]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ConfigurationError(f"config: eos_token_id is {entry!r}: it must be a token id or a list of them")
    return tuple(ids)
