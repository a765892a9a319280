"""The tensor table that Llama, Mistral, Qwen2 and Qwen3 share: names, shapes, and what each strategy splits."""

from collections.abc import Iterator

from mpi_tp.config import ModelConfig
from mpi_tp.partition.plan import REPLICATED, SplitAxis, TensorRow
from mpi_tp.partition.ranges import AxisPartition, Blocks, KeyValueHeads, QueryHeads


def transformer_table(config: ModelConfig) -> list[TensorRow]:
    """Return one row a tensor, under canonical Hugging Face names; a tied `lm_head.weight` has none."""
    vocabulary: SplitAxis = (0, Blocks(config.vocab_size))
    embedding_shape = (config.vocab_size, config.hidden_size)
    rows = [TensorRow("model.embed_tokens.weight", embedding_shape, vocabulary, vocabulary)]
    for layer in range(config.num_hidden_layers):
        rows += _layer_rows(f"model.layers.{layer}.", config)
    rows.append(_norm("model.norm.weight", config.hidden_size))
    if not config.tie_word_embeddings:
        rows.append(TensorRow("lm_head.weight", embedding_shape, vocabulary, vocabulary))
    return rows


def _layer_rows(prefix: str, config: ModelConfig) -> Iterator[TensorRow]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = QueryHeads(config.num_attention_heads, head_dim)
    kv_heads = KeyValueHeads(config.num_attention_heads, config.num_key_value_heads, head_dim)
    heads_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    yield _norm(prefix + "input_layernorm.weight", hidden)
    yield from first_of_pair(attention + "q_proj", heads_size, hidden, heads, config.attention_bias)
    yield from first_of_pair(attention + "k_proj", kv_size, hidden, kv_heads, config.attention_bias)
    yield from first_of_pair(attention + "v_proj", kv_size, hidden, kv_heads, config.attention_bias)
    if config.qk_norm:
        yield _norm(attention + "q_norm.weight", head_dim)
        yield _norm(attention + "k_norm.weight", head_dim)
    yield from second_of_pair(attention + "o_proj", hidden, heads_size, heads, config.output_bias)
    yield _norm(prefix + "post_attention_layernorm.weight", hidden)
    yield from first_of_pair(mlp + "gate_proj", inner, hidden, Blocks(inner), config.mlp_bias)
    yield from first_of_pair(mlp + "up_proj", inner, hidden, Blocks(inner), config.mlp_bias)
    yield from second_of_pair(mlp + "down_proj", hidden, inner, Blocks(inner), config.mlp_bias)


def _norm(name: str, size: int) -> TensorRow:
    """The weight of a norm, which every rank needs whole."""
    return TensorRow(name, (size,), REPLICATED, REPLICATED)


def first_of_pair(name: str, outputs: int, inputs: int, partition: AxisPartition, bias: bool) -> Iterator[TensorRow]:
    """A linear layer that both strategies split by output features."""
    yield TensorRow(name + ".weight", (outputs, inputs), (0, partition), (0, partition))
    if bias:
        yield TensorRow(name + ".bias", (outputs,), (0, partition), (0, partition))


def second_of_pair(name: str, outputs: int, inputs: int, partition: AxisPartition, bias: bool) -> Iterator[TensorRow]:
    """A linear layer that `column_wise` splits by output and `paired` by input features, as its input is split.

    Under `paired` every rank holds the whole bias, which is added once, after the sum.
    """
    by_output: SplitAxis = (0, Blocks(outputs))
    yield TensorRow(name + ".weight", (outputs, inputs), by_output, (1, partition))
    if bias:
        yield TensorRow(name + ".bias", (outputs,), by_output, REPLICATED)
