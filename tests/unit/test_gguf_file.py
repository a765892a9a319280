"""GGUF files: names, row order, dequantised blocks and config, against transformers and the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mpi_tp.errors import ConfigurationError, FileError
from sharder.formats import open_checkpoint
from sharder.formats.gguf_file import GgufReader
from sharder.formats.gguf_translation import ROPE_FACTORS, canonical_name
from tests.support.checkpoints import bits_equal, write_gguf
from tests.support.tiny import AWKWARD, hf_weights, tiny_model

QUANTISABLE = {**AWKWARD, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def reference(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Load the float32 weights of a GGUF file by transformers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    return {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}


def quantisable_model(model_type: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **QUANTISABLE)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_demo_model_equals_transformers(demo_gguf: Path) -> None:
    with GgufReader(demo_gguf, torch.float32) as reader:
        assert reader.config is not None
        expected = reference(demo_gguf, reader.config)
        assert sorted(reader.names()) == sorted(expected)
        for name, tensor in expected.items():
            assert bits_equal(reader.read(name), tensor), name


def test_demo_model_config(demo_gguf: Path) -> None:
    with open_checkpoint(demo_gguf) as reader:
        assert reader.config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
            "rope_scaling": None,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }


def test_metadata_of_every_type_equals_the_gguf_packages(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "Ġ t ▁ 🙂")
    writer.add_array("strings", ["Ġ", "", "\n"])
    writer.add_array("numbers", [3, -1, 4])
    writer.add_array("flags", [True, False])
    writer.add_array("floats", [0.5, -1e30])
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    write_out(writer)
    expected = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    with GgufReader(tmp_path / "model.gguf") as reader:
        assert reader.metadata == {key: value for key, value in expected.items() if not key.startswith("GGUF.")}
        assert len(reader.metadata) > 15


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantisation", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_quantised_models_equal_transformers(
    model_type: str, quantisation: GGMLQuantizationType, tmp_path: Path
) -> None:
    path = write_gguf(quantisable_model(model_type), tmp_path / "model.gguf", quantisation)
    with GgufReader(path, torch.float32) as reader, GgufReader(path) as default:
        assert reader.config is not None
        for name, tensor in reference(path, reader.config).items():
            assert bits_equal(reader.read(name), tensor), name
            quantised = tensor.ndim == 2
            assert default.spec(name).dtype == (torch.bfloat16 if quantised else torch.float32)
            assert bits_equal(default.read(name), tensor.bfloat16() if quantised else tensor), name


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"]
)
def test_every_common_block_type(name: str, tmp_path: Path) -> None:
    """Random blocks, in many slabs, as gguf dequantises them at once."""
    stored_as = GGMLQuantizationType[name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[stored_as]
    rows, columns = 3000, 2 * 256
    blocks = np.random.default_rng(0).integers(0, 128, (rows, columns // block_elements * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=stored_as)
    write_out(writer)
    with np.errstate(all="ignore"), GgufReader(tmp_path / "model.gguf", torch.float32) as reader:
        expected = torch.from_numpy(gguf.dequantize(blocks, stored_as))
        assert bits_equal(reader.read("model.embed_tokens.weight"), expected)


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["LLAMA", "QWEN2", "QWEN3"])
def test_names_are_the_gguf_packages(architecture: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 12)
    checked = 0
    for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[architecture]]:
        gguf_name = gguf.TENSOR_NAMES[tensor].format(bid=11)
        name = canonical_name(f"{gguf_name}.weight")
        if name is not None:
            assert names.get_name(name, try_suffixes=(".weight",)) == f"{gguf_name}.weight"
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3-biases"])
def test_biases(name: str, tmp_path: Path) -> None:
    """Llama's q and k biases are interleaved like their weights, Qwen's are not."""
    model = tiny_model(name)
    with GgufReader(write_gguf(model, tmp_path / "model.gguf")) as reader:
        assert reader.config is not None
        assert reader.config["attention_bias"] is True
        assert reader.config["mlp_bias"] is (name == "llama-tied-biases")
        for tensor_name, tensor in hf_weights(model).items():
            assert bits_equal(reader.read(tensor_name), tensor), tensor_name


def test_linear_rope_scaling(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    with GgufReader(write_gguf(tiny_model("llama"), tmp_path / "model.gguf", extra=extra)) as reader:
        assert reader.config is not None
        assert reader.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_from_its_factors(factor: float, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = 500000.0
    fields = {**QUANTISABLE, "hidden_size": 512, "max_position_embeddings": 131072, "head_dim": 128}
    config = transformers.LlamaConfig(**fields, rope_parameters={**scaling, "rope_theta": theta})
    plain = theta ** -(torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    factors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    model = transformers.LlamaForCausalLM(config)
    with GgufReader(write_gguf(model, tmp_path / "model.gguf", rope_factors=factors.numpy())) as reader:
        assert reader.config is not None
        assert reader.config["rope_theta"] == theta
        assert reader.config["rope_scaling"] == scaling
        assert ROPE_FACTORS not in reader.names()
        assert len(reader.names()) == len(hf_weights(model))


def test_other_rope_scaling_is_refused_only_with_the_config(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, 6, dtype=np.float32)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    for message, written in {
        "not Llama 3's rotary scaling; give --model-config": {"rope_factors": factors},
        "rotary scaling yarn": {"extra": yarn},
    }.items():
        with GgufReader(write_gguf(tiny_model("llama"), tmp_path / "model.gguf", **written)) as reader:
            assert reader.read("model.norm.weight").shape == (60,)
            with pytest.raises(ConfigurationError, match=message):
                reader.config  # noqa: B018


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    write_out(writer)
    with pytest.raises(ConfigurationError, match="'gemma3'; known in GGUF are llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("tensor", "extra", "error", "message"),
    [
        ("blk.0.ffn_gate_inp.weight", {}, ConfigurationError, "tensor blk.0.ffn_gate_inp.weight is not known"),
        ("token_embd.weight", {"split.count": 3}, ConfigurationError, "one of 3 parts; join them first"),
        ("output.weight", {}, FileError, "it has no token_embd.weight"),
        ("blk.0.attn_q.weight", {"llama.attention.head_count": 5}, FileError, "attn_q.weight has 4 rows for 5 heads"),
        ("token_embd.weight", {"llama.attention.head_count": 0}, ConfigurationError, "head_count is 0"),
        ("token_embd.weight", {"llama.attention.head_count": [4, 8]}, ConfigurationError, r"head_count is \[4, 8\]"),
    ],
)
def test_what_cannot_be_read_right_is_refused(
    tensor: str, extra: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in ({"llama.attention.head_count": 2} | extra).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name in {tensor, "token_embd.weight" if tensor.startswith("blk") else tensor}:
        writer.add_tensor(name, np.zeros((4, 2), dtype=np.float32))
    write_out(writer)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "model.gguf")


def test_an_integer_tensor_cannot_be_dequantised(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 2), dtype=np.int32))
    write_out(writer)
    with pytest.raises(ConfigurationError, match=r"token_embd\.weight is stored as I32"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("offset", "value", "error", "message"),
    [
        (4, (1).to_bytes(4, "little"), ConfigurationError, "GGUF version 1"),
        (4, (3).to_bytes(4, "big"), ConfigurationError, "big-endian"),
        (8, (1 << 60).to_bytes(8, "little"), FileError, "damaged"),
        (16, (1 << 60).to_bytes(8, "little"), FileError, "damaged"),
        (24, (1 << 60).to_bytes(8, "little"), FileError, "a metadata key needs 1152921504606846976 bytes"),
    ],
)
def test_damaged_headers(offset: int, value: bytes, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    damaged = bytearray(path.read_bytes())
    damaged[offset : offset + len(value)] = value
    path.write_bytes(damaged)
    with pytest.raises(error, match=message):
        open_checkpoint(path)
