"""Both kernel sets against plain references in float64."""

import math

import numpy as np
import pytest
import torch

from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels import select
from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache, Kernels

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("numerics", ["invariant", "fast"])


def kernels_for(numerics: str) -> Kernels:
    return select(CPU, numerics, torch.float32)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged(lengths: list[int], counts: list[int], block_size: int, seed: int) -> tuple[AttentionInputs, int]:
    """Return inputs for the last `counts` tokens of sequences of `lengths`, blocks shuffled; and the blocks in use."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = rng.permutation(sum(needed) + 3)
    tables = np.zeros((len(lengths), max(needed) + 1), np.int32)
    for row, (end, size) in enumerate(zip(np.cumsum(needed), needed, strict=True)):
        tables[row, :size] = blocks[end - size : end]
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
    ids = np.repeat(np.arange(len(lengths)), counts)
    slots = tables[ids, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return AttentionInputs(*map(torch.from_numpy, (positions, ids, tables, slots))), len(blocks)


def store(kernels: Kernels, k: torch.Tensor, v: torch.Tensor, cache: Cache, inputs: AttentionInputs) -> None:
    """Store keys and values [T, G, D] as they are: a rotation by nothing changes no bit of a finite number."""
    kv_heads, width = k.shape[1:]
    heads = AttentionHeads(torch.zeros(1, dtype=torch.int64), kv_heads, width)
    qkv = torch.cat((torch.zeros(len(k), 1, width), k, v), dim=1).flatten(1)
    kernels.rotate_and_store(qkv, heads, (torch.ones(len(k), width), torch.zeros(len(k), width)), cache, inputs)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return heads [T, H, D] turned by angles [T, D/2] as complex numbers, in float64."""
    half = x.shape[-1] // 2
    turns = torch.polar(torch.ones(1).double(), angles.double())[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
    return torch.cat((turned.real, turned.imag), -1)


def plain_attention(q, k, v, kv_index, scale, window):
    """Attention of the last tokens [C, H, D] of one sequence over its keys and values [L, G, D], in float64."""
    q, k, v = (x.double() for x in (q, k[:, kv_index], v[:, kv_index]))
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))
    hidden = (keys > last) | (keys <= last - (window or len(k)))
    scores = torch.einsum("chd,lhd->hcl", q, k) * scale
    return torch.einsum("hcl,lhd->chd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 576, 97), (7, 300, 64), (3, 1, 5), (0, 8, 16), (4, 0, 3), (2, 9, 0)]
)
def test_linear(numerics, dtype, tokens, inputs, outputs):
    kernels = select(CPU, numerics, dtype)
    weight, bias = random(1, outputs, inputs).to(dtype), random(2, outputs).to(dtype)
    x = random(3, tokens, inputs).to(kernels.activation_dtype or dtype)
    y = kernels.linear(x, kernels.prepare(weight), bias)
    expected = x.double() @ weight.double().T + bias.double()
    assert y.dtype == x.dtype
    bound = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert y.shape == (tokens, outputs)
    # Every sum of K terms in float32 keeps to K units of the last place of the sum of magnitudes.
    assert ((y - expected).abs() <= (inputs * 2**-24 + 2 * torch.finfo(y.dtype).eps) * bound).all()


@BOTH
def test_linear_takes_rows_with_gaps(numerics):
    kernels = kernels_for(numerics)
    x, weight = random(1, 6, 50), random(2, 33, 20)
    y = kernels.linear(x[:, 10:30], kernels.prepare(weight))
    torch.testing.assert_close(y, x[:, 10:30] @ weight.T)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_gives_exact_rows_and_zeros_elsewhere(numerics, dtype):
    kernels = select(CPU, numerics, dtype)
    weight = random(1, 37, 24).to(dtype)
    ids = torch.tensor([5, 99, 100, 116, 136, 137, 120])
    rows = kernels.embedding(ids, kernels.prepare(weight), 100)
    assert rows.dtype == (kernels.activation_dtype or dtype)
    for row, number in zip(rows, ids - 100, strict=True):
        expected = weight[number] if 0 <= number < 37 else torch.zeros(24)
        assert torch.equal(row.float(), expected.float())
    assert not kernels.embedding(ids, kernels.prepare(weight[:0]), 100).any()


@BOTH
@pytest.mark.parametrize("shape", [(1, 576), (5, 7, 64), (3, 1), (0, 16)])
def test_rms_norm(numerics, shape):
    x, weight = random(1, *shape) * 5, random(2, shape[-1])
    y = kernels_for(numerics).rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(y.double(), expected, rtol=5e-7, atol=0)


@BOTH
@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "none"])
def test_activations(numerics, name):
    x = torch.cat((random(1, 999) * 8, torch.tensor([0.0, -0.0, 100.0, -100.0, math.inf])))
    if name == "gelu" and numerics == "fast":
        x = x[x.isfinite()]  # torch's own gives NaN for infinity on some processors
    wide = x.double()
    expected = {
        "relu": wide.relu(),
        "gelu": torch.nn.functional.gelu(wide),
        "silu": wide / (1 + torch.exp(-wide)),
        "tanh": wide.tanh(),
        "none": wide,
    }[name]
    y = kernels_for(numerics).activation(x, name)
    error = torch.where(y == expected, 0, (y - expected).abs())
    # torch's own gelu and tanh are vectorised approximations on some processors.
    rounding = {"invariant": 1e-6, "fast": 1e-5}[numerics]
    assert (error <= rounding * x.abs().clamp(min=1)).all()
    with pytest.raises(KeyError):
        kernels_for(numerics).activation(x, "swish2")


@BOTH
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (2, 2, 16), (3, 1, 6), (5, 2, 80)])
def test_attention(numerics, window, heads, kv_heads, width):
    kernels = kernels_for(numerics)
    lengths, counts, block_size = [70, 1, 33, 16, 150], [1, 1, 33, 5, 20], 16
    inputs, blocks = paged(lengths, counts, block_size, seed=4)
    kv_index = torch.arange(heads) * kv_heads // heads
    # Whatever is stale in the cache must stay out of the result.
    cache = tuple(torch.full((blocks, block_size, kv_heads, width), math.nan) for _ in range(2))
    whole, _ = paged(lengths, lengths, block_size, seed=4)
    k, v = random(1, sum(lengths), kv_heads, width), random(2, sum(lengths), kv_heads, width)
    store(kernels, k, v, cache, whole)
    q = random(3, sum(counts), heads, width)
    y = kernels.attention(q, cache, AttentionHeads(kv_index, kv_heads, width), inputs, window)
    sequences = zip(q.split(counts), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([plain_attention(*parts, kv_index, width**-0.5, window) for parts in sequences])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6)


@BOTH
def test_attention_of_no_tokens(numerics):
    inputs = AttentionInputs(
        *(torch.zeros(0, dtype=torch.int64),) * 2,
        torch.zeros(0, 1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
    )
    cache = torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8)
    heads = AttentionHeads(torch.zeros(2, dtype=torch.int64), 1, 8)
    y = kernels_for(numerics).attention(torch.zeros(0, 2, 8), cache, heads, inputs, None)
    assert y.shape == (0, 2, 8)


@BOTH
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [6, 64])
def test_rotate_and_store(width, normed, numerics):
    kernels, kv_heads, kv_index = kernels_for(numerics), 2, torch.tensor([0, 0, 1, 1, 1])
    inputs, blocks = paged([3, 20, 1], [3, 2, 1], 16, seed=1)
    norms = {"q_norm": random(4, width), "k_norm": random(5, width), "norm_eps": 1e-5} if normed else {}
    heads = AttentionHeads(kv_index, kv_heads, width, **norms)
    qkv, angles = random(2, 6, 9 * width), random(3, 6, width // 2)
    rotation = tuple(torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    caches = [tuple(torch.full((blocks, 16, kv_heads, width), 7.0) for _ in range(2)) for _ in range(2)]
    y = kernels.rotate_and_store(qkv, heads, rotation, caches[0], inputs)
    q, k, v = qkv.unflatten(-1, (-1, width)).split((5, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = (
            torch.nn.functional.rms_norm(x.double(), (width,), norms[name].double(), 1e-5)
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        )
    torch.testing.assert_close(y.double(), rotated(q, angles), rtol=0, atol=4e-6)
    store(kernels, rotated(k, angles).float(), v, caches[1], inputs)
    for stored, expected in zip(*caches, strict=True):
        torch.testing.assert_close(stored, expected, rtol=0, atol=4e-6)


@BOTH
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 300, 200), (4, 30, 37), (9, 3, 1), (0, 8, 16), (4, 0, 3), (2, 9, 0)]
)
def test_gated_linear(tokens, inputs, outputs, dtype, biased, numerics):
    kernels = select(CPU, numerics, dtype)
    gate, up, bias = (
        random(seed, *shape).to(dtype)
        for seed, shape in ((2, (outputs, inputs)), (3, (outputs, inputs)), (4, (2 * outputs,)))
    )
    x = random(1, tokens, inputs).to(kernels.activation_dtype or dtype)
    y = kernels.gated_linear(x, kernels.prepare_gated(gate, up), bias if biased else None)
    wide = torch.cat((gate, up)).double()
    offset = bias.double() if biased else torch.zeros(2 * outputs).double()
    gated, upped = (x.double() @ wide.T + offset).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gated) * upped
    assert y.dtype == x.dtype
    unit = torch.finfo(y.dtype).eps
    # The bound of `linear` on both factors; silu is nowhere steeper than 1.1.
    error = (inputs * 2**-24 + 2 * unit) * (x.double().abs() @ wide.abs().T + offset.abs())
    gate_error, up_error = error.chunk(2, dim=-1)
    bound = 1.1 * gate_error * (upped.abs() + up_error) + gated.abs() * up_error + 4 * unit * expected.abs()
    assert ((y - expected).abs() <= bound).all()


@BOTH
def test_add_rms_norm(numerics):
    kernels, x, delta, weight = kernels_for(numerics), random(1, 5, 64), random(2, 5, 64), random(3, 64)
    total = x + delta
    added, normed = kernels.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(added, total)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (64,), weight, 1e-5))


@BOTH
def test_the_best_token_is_the_first_of_equals(numerics):
    kernels = kernels_for(numerics)
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-5.0, -math.inf, -4.0, -4.0], [0.0, math.nan, math.inf, 1.0]])
    best = kernels.best_token(x, 100)
    assert best[:, 1].tolist() == [101.0, 102.0, 101.0]
    assert best[:2, 0].tolist() == [3.0, -4.0]
    assert best[2, 0].isnan()
    assert kernels.best_token(x[:, :0], 7)[:, 0].tolist() == [-math.inf] * 3


@BOTH
def test_the_token_of_the_best_rank(numerics):
    pairs = [[[1.0, 5.0], [2.0, 50.0]], [[2.0, 6.0], [2.0, 60.0]], [[3.0, 7.0], [math.nan, 70.0]], [[9.0, 8.0]] * 2]
    pairs += [[[math.inf, 9.0], [0.0, 90.0]]]
    assert kernels_for(numerics).choose_token(torch.tensor(pairs)).tolist() == [50, 6, -1, 8, -1]


@BOTH
def test_the_best_of_many_tokens(numerics):
    x = random(1, 5, 5000)
    x[1, 4999], x[2, 3000], x[3, 2999:] = 9.0, math.nan, math.inf
    best = kernels_for(numerics).best_token(x, 7)
    assert best[:, 1].tolist() == (x.argmax(dim=-1) + 7).tolist()
    for row, token in enumerate(best[:, 1].long() - 7):
        assert torch.equal(best[row, :1].view(torch.int32), x[row, token : token + 1].view(torch.int32))


@BOTH
def test_storing_touches_its_slots_only(numerics):
    cache = torch.full((4, 3, 2, 4), 7.0), torch.full((4, 3, 2, 4), 8.0)
    k, v, nothing = random(1, 3, 2, 4), random(2, 3, 2, 4), torch.zeros(3, dtype=torch.int64)
    inputs = AttentionInputs(nothing, nothing, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([11, 0, 4]))
    store(kernels_for(numerics), k, v, cache, inputs)
    for stored, new, old in zip(cache, (k, v), (7.0, 8.0), strict=True):
        # The order inside a block is the kernels' own; the blocks are not.
        for block, token in ((3, 0), (0, 1), (1, 2)):
            assert torch.equal(stored[block][stored[block] != old].sort().values, new[token].flatten().sort().values)
        assert (stored[2] == old).all()


def test_select():
    from mpi_tp.kernels.invariant import InvariantKernels
    from mpi_tp.kernels.torch_kernels import TorchKernels

    assert isinstance(select(CPU, "auto", torch.bfloat16), InvariantKernels)
    assert isinstance(select(CPU, "fast", torch.bfloat16), TorchKernels)
    for device, numerics in ((CPU, "invariant"), (torch.device("cuda"), "fast")):
        with pytest.raises(ConfigurationError, match="float8"):
            select(device, numerics, torch.float8_e4m3fn)
