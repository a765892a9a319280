"""Writes one state dict in every form that the sharder takes, with the libraries that define these forms."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from gguf import GGMLQuantizationType

from tests.support.tiny import hf_config, hf_weights

GGUF_STORED = {
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.float32: GGMLQuantizationType.F32,
}


def write_safetensors(model: transformers.PreTrainedModel, folder: Path) -> Path:
    safetensors.torch.save_file(hf_weights(model), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def write_state_dict(model: transformers.PreTrainedModel, folder: Path) -> Path:
    torch.save(hf_weights(model), folder / "weights.pt")
    return folder / "weights.pt"


def write_model_and_config(model: transformers.PreTrainedModel, folder: Path) -> Path:
    torch.save({"model": hf_weights(model), "config": hf_config(model), "epoch": 3}, folder / "both.pt")
    return folder / "both.pt"


def write_folder(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder / "whole")
    return folder / "whole"


def write_sharded_folder(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder / "sharded", max_shard_size="60KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 1
    return folder / "sharded"


def write_bin_folder(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Two `.bin` files and their index, as transformers wrote them up to version 4."""
    target = folder / "bins"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(hf_config(model)))
    weight_map = {}
    for part in (0, 1):
        weights = dict(list(hf_weights(model).items())[part::2])
        file = f"pytorch_model-{part + 1:05d}-of-00002.bin"
        torch.save(weights, target / file)
        weight_map |= dict.fromkeys(weights, file)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def write_plain_gguf(model: transformers.PreTrainedModel, folder: Path) -> Path:
    return write_gguf(model, folder / "model.gguf")


FORMS: dict[str, Callable[[transformers.PreTrainedModel, Path], Path]] = {
    "safetensors": write_safetensors,
    "state_dict": write_state_dict,
    "model_and_config": write_model_and_config,
    "folder": write_folder,
    "sharded_folder": write_sharded_folder,
    "bin_folder": write_bin_folder,
    "gguf": write_plain_gguf,
}


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    quantisation: GGMLQuantizationType | None = None,
    extra: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does; matrices are quantised if `quantisation` is given."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, tensor in hf_weights(model).items():
        _add_tensor(writer, config, name, tensor, quantisation if tensor.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(
    writer: gguf.GGUFWriter,
    config: transformers.PretrainedConfig,
    name: str,
    tensor: torch.Tensor,
    quantisation: GGMLQuantizationType | None,
) -> None:
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert gguf_name is not None, name
    if config.model_type == "llama" and "q_proj" in name:
        tensor = permute(tensor, config.num_attention_heads)
    if config.model_type == "llama" and "k_proj" in name:
        tensor = permute(tensor, config.num_key_value_heads)
    if quantisation is None:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(gguf_name, raw, raw_dtype=GGUF_STORED[tensor.dtype])
    else:
        writer.add_tensor(gguf_name, gguf.quantize(tensor.float().numpy(), quantisation), raw_dtype=quantisation)


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes (NaNs included)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left_bytes, right_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left_bytes, right_bytes)
