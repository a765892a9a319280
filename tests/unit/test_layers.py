"""Parallel layers on thread ranks, even and uneven, against torch's own on the whole weights."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mpi_tp.comm.threads import run_ranks
from mpi_tp.config import ACTIVATIONS
from mpi_tp.engine.kv_cache import BLOCK_SIZE, allocate_cache, blocks_for
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.sequence import Chunk, Sequence
from mpi_tp.engine.step import plan_step
from mpi_tp.kernels import select
from mpi_tp.kernels.base import AttentionInputs
from mpi_tp.layers.attention import Attention
from mpi_tp.layers.context import LayerContext
from mpi_tp.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mpi_tp.layers.linear import ColumnParallelLinear, GatheredLinear, RowParallelLinear, second_linear
from mpi_tp.models.families import parse_config
from mpi_tp.models.mlp import mlp_config
from mpi_tp.models.mlp_stack import MLPStack
from mpi_tp.models.transformer_table import transformer_table
from mpi_tp.partition.plan import STRATEGIES, TensorRow, plan_shards
from mpi_tp.partition.ranges import Blocks, KeyValueHeads, QueryHeads
from tests.support.parallel import CPU, layer_context, slice_for
from tests.support.tiny import AWKWARD

RANKS = (1, 2, 3, 4)
NUMERICS = ("fast", "invariant")
TOKENS = 5


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def on_ranks(size, rows, weights, strategy, numerics, function):
    """Return what `function(context)` gives on each of `size` ranks that hold their parts of the weights."""
    plan = plan_shards(rows, strategy, size)
    kernels = select(CPU, numerics, next(iter(weights.values())).dtype)

    def run(comm):
        take = {name: slice_for(planned, weights[name], comm.rank) for name, planned in plan.items()}
        return function(LayerContext(comm, kernels, plan, CPU, take.__getitem__))

    return run_ranks(size, run)


def assert_on_all(results, expected):
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def linear_rows(outputs, inputs):
    """A layer that `column_wise` splits by output and `paired` by input, its bias then whole on every rank."""
    by_output = (0, Blocks(outputs))
    return [
        TensorRow("layer.weight", (outputs, inputs), by_output, (1, Blocks(inputs))),
        TensorRow("layer.bias", (outputs,), by_output, None),
    ]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", RANKS)
def test_the_second_linear_adds_its_bias_once(size, strategy, numerics):
    inputs, outputs = 50, 37
    weights = {"layer.weight": randn(outputs, inputs), "layer.bias": 100 + randn(outputs)}
    x = randn(TOKENS, inputs)
    parts = [Blocks(inputs).ranges(rank, size) for rank in range(size)]

    def forward(context):
        layer = second_linear(context, "layer", [stop - start for ((start, stop),) in parts])
        assert isinstance(layer, GatheredLinear if strategy == "column_wise" else RowParallelLinear)
        [(start, stop)] = parts[context.comm.rank]
        return layer(x[:, start:stop].contiguous())

    results = on_ranks(size, linear_rows(outputs, inputs), weights, strategy, numerics, forward)
    assert_on_all(results, functional.linear(x, weights["layer.weight"], weights["layer.bias"]))


HEADS = [(5, 1), (6, 2), (4, 2), (7, 7), (9, 3)]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("size", RANKS)
def test_each_query_head_finds_its_key_and_value_heads(size, num_heads, num_kv_heads, numerics):
    """q, k and v come from one product; put together again in heads they are those of the whole."""
    head_dim, hidden = 6, 20
    queries, keys = QueryHeads(num_heads, head_dim), KeyValueHeads(num_heads, num_kv_heads, head_dim)
    partitions = {"q": (queries, num_heads), "k": (keys, num_kv_heads), "v": (keys, num_kv_heads)}
    rows, weights, x = [], {}, randn(TOKENS, hidden)
    for seed, (name, (partition, heads)) in enumerate(partitions.items()):
        split = (0, partition)
        rows += [
            TensorRow(f"{name}.weight", (heads * head_dim, hidden), split, split),
            TensorRow(f"{name}.bias", (heads * head_dim,), split, split),
        ]
        weights |= {f"{name}.weight": randn(heads * head_dim, hidden, seed=seed)}
        weights |= {f"{name}.bias": randn(heads * head_dim, seed=seed)}

    def forward(context):
        layer = ColumnParallelLinear(context, *partitions)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in layer(x).split(layer.output_sizes, dim=-1))
        index = keys.index(context.comm.rank, size)
        return q, k[:, index], v[:, index]

    results = on_ranks(size, rows, weights, "column_wise", numerics, forward)
    for name, parts in zip(partitions, zip(*results, strict=True), strict=True):
        whole = functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]).unflatten(-1, (-1, head_dim))
        group = 1 if name == "q" else num_heads // num_kv_heads
        torch.testing.assert_close(torch.cat(parts, dim=1), whole.repeat_interleave(group, dim=1))


def attention_inputs(lengths):
    """Whole prompts of these lengths, in blocks of the cache that lie in no order."""
    sequences, next_block = [], sum(map(blocks_for, lengths))
    for length in lengths:
        sequence = Sequence(SamplingParams(), 0, [0] * length, length, length)
        next_block -= blocks_for(length)
        sequence.blocks = np.arange(next_block, next_block + blocks_for(length), dtype=np.int32)
        sequences.append(sequence)
    plan = plan_step([Chunk(sequence, 0, len(sequence.tokens), True) for sequence in sequences], BLOCK_SIZE)
    places = [torch.from_numpy(array).long() for array in (plan.positions, plan.sequence_ids, plan.slots)]
    positions, sequence_ids, slots = places
    inputs = AttentionInputs(positions, sequence_ids, torch.from_numpy(plan.block_tables), slots)
    return inputs, sum(map(blocks_for, lengths))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_attention_with_fewer_kv_heads_than_ranks(num_kv_heads, strategy, numerics):
    """Four heads on four ranks, against torch's grouped-query attention; without rotation, so that only heads count."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": num_kv_heads, "head_dim": 6, "attention_bias": True}
    config = parse_config({**AWKWARD, "model_type": "llama", **fields})
    rows = [row for row in transformer_table(config) if "layers.0.self_attn" in row.name]
    weights = {row.name: randn(*row.shape, seed=seed) * 0.3 for seed, row in enumerate(rows)}
    lengths = [3, 20, 1]
    x = randn(sum(lengths), config.hidden_size)
    inputs, num_blocks = attention_inputs(lengths)
    rotation = torch.ones(len(x), config.head_dim), torch.zeros(len(x), config.head_dim)

    def forward(context):
        layer = Attention(context, "model.layers.0.self_attn", config)
        [cache, *_] = allocate_cache(config, num_blocks, context.comm.rank, 4, torch.float32, CPU)
        return layer(x, rotation, inputs, cache)

    def linear(x, name):
        name = f"model.layers.0.self_attn.{name}"
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    expected = []
    for sequence in x.split(lengths):
        q, k, v = (
            linear(sequence, f"{name}_proj").unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for name in "qkv"
        )
        y = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        expected.append(linear(y[0].transpose(0, 1).flatten(1), "o_proj"))
    assert_on_all(on_ranks(4, rows, weights, strategy, numerics, forward), torch.cat(expected))


VOCABULARY = 257


def vocabulary_rows(*names):
    split = (0, Blocks(VOCABULARY))
    return [TensorRow(f"{name}.weight", (VOCABULARY, 24), split, split) for name in names]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", RANKS)
def test_a_vocabulary_that_no_rank_count_divides(size, tied, numerics):
    names = ["embed"] if tied else ["embed", "head"]
    weights = {f"{name}.weight": randn(VOCABULARY, 24, seed=seed) for seed, name in enumerate(names)}
    ids = torch.tensor([0, 256, 5, 128, 127, 64, 5, 192])
    hidden = randn(3, 24)

    def forward(context):
        embedding = VocabParallelEmbedding(context, "embed")
        return embedding(ids), ParallelLMHead(context, embedding, "head")(hidden)

    results = on_ranks(size, vocabulary_rows(*names), weights, "column_wise", numerics, forward)
    assert all(torch.equal(rows, weights["embed.weight"][ids]) for rows, _ in results)
    assert_on_all([logits for _, logits in results], functional.linear(hidden, weights[f"{names[-1]}.weight"]))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("size", [*RANKS, 7])
def test_the_likeliest_token_of_a_split_vocabulary(size, numerics):
    """Equal logits on several ranks, and rows that hold what is no number, against an argmax over all of them."""
    weight = randn(VOCABULARY, 24).round()
    weight[[3, 70, 200, 256]] = weight[3] * 10
    hidden = torch.stack((weight[3], *randn(4, 24).round(), torch.full((24,), float("nan"))))

    def forward(context):
        return ParallelLMHead(context, VocabParallelEmbedding(context, "embed"), "head").greedy(hidden)

    expected = functional.linear(hidden, weight).argmax(-1)
    expected[-1] = -1
    assert expected[0] == 3
    results = on_ranks(size, vocabulary_rows("embed"), {"embed.weight": weight}, "column_wise", numerics, forward)
    assert all(torch.equal(tokens, expected) for tokens in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_minus_zero_in_an_embedding_has_the_same_bits_at_any_rank_count(numerics, dtype):
    weight = randn(VOCABULARY, 24, dtype=dtype)
    weight[::2] = -0.0
    ids = torch.arange(VOCABULARY)
    by_size = [
        on_ranks(
            size,
            vocabulary_rows("embed"),
            {"embed.weight": weight},
            "column_wise",
            numerics,
            lambda context: VocabParallelEmbedding(context, "embed")(ids),
        )
        for size in RANKS
    ]
    assert not by_size[0][0][::2].signbit().any()
    for results in by_size:
        assert all(torch.equal(rows.view(torch.uint8), by_size[0][0].view(torch.uint8)) for rows in results)


FUNCTIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "none": nn.Identity}
STACKS = [[9, 40], [9, 40, 7], [9, 40, 33, 20], [17, 5, 64, 4, 50]]


def build_stack(sizes, activation):
    """Return torch's own stack, whose second layer has no bias, and our config of it."""
    torch.manual_seed(sum(sizes))
    modules = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        modules += [nn.Linear(inputs, outputs, bias=index != 1), FUNCTIONS[activation]()]
    stack = nn.Sequential(*modules[:-1])
    return stack, mlp_config({name: tuple(tensor.shape) for name, tensor in stack.state_dict().items()}, activation)


def run_stack(size, stack, config, strategy, numerics, x):
    kernels = select(CPU, numerics, torch.float32)

    def run(comm):
        context = layer_context(config, stack.state_dict(), comm, kernels, strategy)
        return MLPStack(context, parse_config(config))(x)

    return run_ranks(size, run)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", STACKS)
def test_a_stack_of_linear_layers(sizes, activation, strategy, numerics):
    stack, config = build_stack(sizes, activation)
    x = randn(TOKENS, sizes[0])
    for size in RANKS:
        assert_on_all(run_stack(size, stack, config, strategy, numerics, x), stack(x).detach())


@pytest.mark.parametrize("sizes", STACKS)
def test_a_stack_gives_the_same_bits_on_any_rank_count_and_for_any_batch(sizes):
    stack, config = build_stack(sizes, "gelu")
    x = randn(TOKENS, sizes[0])
    [whole] = run_stack(1, stack, config, "column_wise", "invariant", x)
    for size in RANKS[1:]:
        assert all(torch.equal(y, whole) for y in run_stack(size, stack, config, "column_wise", "invariant", x))
        alone = run_stack(size, stack, config, "column_wise", "invariant", x[3:4])
        assert all(torch.equal(y, whole[3:4]) for y in alone)
