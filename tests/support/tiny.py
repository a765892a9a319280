"""Tiny random transformers with awkward sizes, as transformers builds them."""

from typing import Any

import torch
import transformers

AWKWARD = {
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 257,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **AWKWARD},
    "llama-tied-biases": {
        **AWKWARD,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_hidden_layers": 1,
    },
    "llama3-rope": {
        **AWKWARD,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear-rope": {
        **AWKWARD,
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral-window": {**AWKWARD, "model_type": "mistral", "sliding_window": 7, "head_dim": 8},
    "qwen2": {**AWKWARD, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**AWKWARD, "model_type": "qwen3", "head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3-biases": {**AWKWARD, "model_type": "qwen3", "head_dim": 10, "attention_bias": True, "num_hidden_layers": 1},
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return a seeded random model whose biases and norms are random too, so that none can be forgotten unseen."""
    fields = dict(TINY_CONFIGS[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return model.to(dtype)


def hf_config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    return model.config.to_dict()


def hf_weights(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint of the model holds; a tied `lm_head.weight` is not one."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors
