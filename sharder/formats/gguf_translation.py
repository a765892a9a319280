"""GGUF's names and metadata in Hugging Face's terms, for the architectures that both describe alike."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpi_tp.errors import ConfigurationError, FileError
from sharder.formats.gguf_header import GgufTensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# llama.cpp rotates neighbouring pairs for these, so its converter interleaves the rows of q and k.
INTERLEAVED_ARCHITECTURES = frozenset({"llama"})

# Not a weight: the llama3 frequency factors, which the config holds in another form.
ROPE_FACTORS = "rope_freqs.weight"

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# The constants of every published Llama 3.1 to 3.3 model; only the factor differs.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def canonical_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None if it has none."""
    match = re.fullmatch(r"(?:blk\.(?P<block>[0-9]+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)", name)
    if not match:
        return None
    block, stem, kind = match["block"], match["stem"], match["kind"]
    if block is None:
        return f"{MODEL_NAMES[stem]}.{kind}" if stem in MODEL_NAMES else None
    return f"model.layers.{block}.{BLOCK_NAMES[stem]}.{kind}" if stem in BLOCK_NAMES else None


def interleaved_heads(metadata: Mapping[str, Any], entries: Mapping[str, GgufTensor], path: Path) -> dict[str, int]:
    """Return, by canonical name, the tensors whose rows the converter interleaved and their numbers of heads.

    Raises ConfigurationError for missing head counts, FileError for rows that they do not divide into pairs.
    """
    if metadata["general.architecture"] not in INTERLEAVED_ARCHITECTURES:
        return {}
    num_heads, num_kv_heads = _head_counts(metadata)
    heads_of = {"q_proj": num_heads, "k_proj": num_kv_heads}
    interleaved = {name: heads_of[name.split(".")[-2]] for name in entries if name.split(".")[-2] in heads_of}
    for name, heads in interleaved.items():
        rows = entries[name].shape[0]
        if rows % (2 * heads):
            raise FileError(f"{path} is damaged: {entries[name].name} has {rows} rows for {heads} heads")
    return interleaved


def translate_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: torch.Tensor | None
) -> dict[str, Any]:
    """Return the metadata as a Hugging Face config; `shapes` are those of the tensors, by canonical name.

    `rope_factors` [head_dim / 2] is the file's `rope_freqs.weight`, if it has one. Raises ConfigurationError for a
    missing field, and for what such a config cannot express.
    """
    architecture = metadata["general.architecture"]
    hidden_size = _count(metadata, "embedding_length")
    num_heads, num_kv_heads = _head_counts(metadata)
    head_dim = _count(metadata, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _optional(metadata, key, head_dim) != head_dim:
            raise ConfigurationError(
                f"{key} is {_optional(metadata, key, None)}, the head size {head_dim}: not supported"
            )
    rope_theta = _number(metadata, "rope.freq_base", 10000.0)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": _count(metadata, "feed_forward_length"),
        "num_hidden_layers": _count(metadata, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(metadata, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _count(metadata, "context_length"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, rope_theta, head_dim, rope_factors),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
    }
    return config | _token_ids(metadata)


def llama3_rope_factors(rope_theta: float, head_dim: int, factor: float) -> torch.Tensor:
    """By what llama3 scaling divides each rotary frequency: [head_dim / 2], float32."""
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    frequencies = rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rotations = LLAMA3_ROPE["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    smooth = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).float()


def _rope_scaling(
    metadata: Mapping[str, Any], rope_theta: float, head_dim: int, rope_factors: torch.Tensor | None
) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a Hugging Face config, None for plain rotary embeddings."""
    kind = _optional(metadata, "rope.scaling.type", "linear")  # llama.cpp's default, with a factor of 1
    if rope_factors is not None:
        factor = float(f"{rope_factors.max().item():.6g}")
        same_shape = rope_factors.shape == (head_dim // 2,)
        if not same_shape or not torch.allclose(
            rope_factors, llama3_rope_factors(rope_theta, head_dim, factor), rtol=1e-4
        ):
            raise ConfigurationError(f"{ROPE_FACTORS} is not Llama 3's rotary scaling; give --model-config")
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    factor = _number(metadata, "rope.scaling.factor", _optional(metadata, "rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    raise ConfigurationError(f"rotary scaling {kind} of a GGUF file is not supported (linear, llama3 are)")


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the special token ids that the file names."""
    fields = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    keys = {field: f"tokenizer.ggml.{key}" for field, key in fields.items()}
    return {field: metadata[key] for field, key in keys.items() if key in metadata}


def _head_counts(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of query and of KV heads."""
    num_heads = _count(metadata, "attention.head_count")
    return num_heads, _count(metadata, "attention.head_count_kv", num_heads)


def _count(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _optional(metadata, key, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"GGUF metadata: {metadata['general.architecture']}.{key} is {value}, needed is one number above 0"
        )
    return value


def _optional(metadata: Mapping[str, Any], key: str, default: Any) -> Any:
    return metadata.get(f"{metadata['general.architecture']}.{key}", default)


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number, with the rounding of a decimal constant to float32 undone (9.999999747378752e-06: 1e-05)."""
    value = _optional(metadata, key, default)
    if not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"GGUF metadata: {metadata['general.architecture']}.{key} is {value}, needed is a number"
        )
    return float(str(np.float32(value)))
