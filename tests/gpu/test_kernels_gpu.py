"""The GPU's kernels against plain torch, and the promise of the invariant ones, bit for bit."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mpi_tp.kernels.base import AttentionHeads
from mpi_tp.kernels.torch_kernels import TorchKernels

BLOCK_SIZE = 16
HALVES = (torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
BOTH = pytest.mark.parametrize("invariant", [True, False])


@pytest.fixture(scope="module")
def kernels_for():
    from mpi_tp.kernels.gpu_kernels import GpuKernels

    return GpuKernels


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """By the norm of the difference: 8 bits of mantissa keep to 1e-2, 11 to 1e-3, sums in float32 to 1e-5."""
    bound = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[result.dtype]
    assert not result.isnan().any()
    assert (result.double() - expected.double()).norm() <= bound * expected.double().norm()


@BOTH
@DTYPES
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 576), (70, 131)])
def test_products(kernels_for, tokens, outputs, inputs, dtype, invariant):
    kernels = kernels_for(invariant)
    x, gate, up = (random(s, n, inputs, dtype=dtype) for s, n in ((1, tokens), (2, outputs), (3, outputs)))
    bias = random(4, 2 * outputs, dtype=dtype)
    expected = x.double() @ gate.double().T + bias[:outputs].double()
    assert_close(kernels.linear(x, kernels.prepare(gate), bias[:outputs].contiguous()), expected)
    expected = functional.silu(expected) * (x.double() @ up.double().T + bias[outputs:].double())
    assert_close(kernels.gated_linear(x, kernels.prepare_gated(gate, up), bias), expected)


@DTYPES
@pytest.mark.parametrize("inputs", [576])
def test_a_row_of_a_product_alone_and_in_any_batch(kernels_for, inputs, dtype):
    kernels = kernels_for(True)
    x, gate, up = (random(s, n, inputs, dtype=dtype) for s, n in ((1, 300), (2, 200), (3, 200)))
    plain, gated = kernels.prepare(gate), kernels.prepare_gated(gate, up)
    whole, whole_gated = kernels.linear(x, plain), kernels.gated_linear(x, gated)
    for tokens in (1, 2, 3, 16, 17, 33, 64, 65, 129, 257):
        rows = torch.randperm(300, device="cuda")[:tokens]
        assert torch.equal(kernels.linear(x[rows], plain), whole[rows])
        assert torch.equal(kernels.gated_linear(x[rows], gated), whole_gated[rows])


@DTYPES
def test_any_slice_of_columns_of_a_product(kernels_for, dtype):
    kernels = kernels_for(True)
    weight = random(2, 500, 576, dtype=dtype)
    for tokens in (1, 5, 40, 300):
        x = random(1, tokens, 576, dtype=dtype)
        whole = kernels.linear(x, kernels.prepare(weight))
        for start, stop in ((0, 1), (3, 20), (16, 144), (250, 500), (499, 500)):
            assert torch.equal(kernels.linear(x, kernels.prepare(weight[start:stop])), whole[:, start:stop])


@BOTH
@DTYPES
def test_norms(kernels_for, dtype, invariant):
    x, delta, weight = (random(s, *shape, dtype=dtype) for s, shape in ((1, (37, 576)), (2, (37, 576)), (3, (576,))))
    kernels, plain = kernels_for(invariant), TorchKernels()
    assert_close(kernels.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    total = x + delta
    whole, normed = kernels.add_rms_norm(x.clone(), delta, weight, 1e-5)
    assert torch.equal(whole, total)
    alone = torch.cat(
        [kernels.add_rms_norm(x[i : i + 1].clone(), delta[i : i + 1], weight, 1e-5)[1] for i in range(37)]
    )
    assert torch.equal(alone, normed)


def test_the_best_token(kernels_for):
    kernels = kernels_for(False)
    logits = random(1, 9, 49_152, dtype=torch.bfloat16)
    best = kernels.best_token(logits, 1000)
    assert torch.equal(best[:, 1].long() - 1000, logits.float().argmax(-1))  # bfloat16 has many equals
    assert torch.equal(best[:, 0], logits.float().amax(-1))
    logits[3, 77] = float("nan")
    pairs = torch.stack((best, kernels.best_token(logits, 60_000)), dim=1)
    assert kernels.choose_token(pairs)[3] == -1
    assert torch.equal(kernels.choose_token(pairs)[:3], best[:3, 1].long())


class Paged:
    """Sequences, their queries, keys and values, and a cache that is NaN where nothing was written."""

    def __init__(self, lengths: list[int], groups: list[int], width: int, dtype: torch.dtype) -> None:
        self.lengths = lengths
        self.heads = AttentionHeads(
            torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups)).cuda(), len(groups), width
        )
        size = len(groups) + sum(groups) + len(groups)
        self.qkv = [random(10 + s, length, size * width, dtype=dtype) for s, length in enumerate(lengths)]
        self.dtype = dtype

    def run(self, kernels, schedule: list[list[tuple[int, int, int]]], window: int | None) -> list[torch.Tensor]:
        """Run steps of (sequence, first, end), single tokens first, on a fresh cache; return results by sequence."""
        from mpi_tp.kernels.gpu.attention import tokens_per_tile
        from mpi_tp.kernels.gpu.tiles import TiledInputs, tile

        needed = [-(-length // BLOCK_SIZE) for length in self.lengths]
        blocks = np.random.default_rng(0).permutation(sum(needed)).astype(np.int32)
        tables = np.zeros((len(needed), max(needed)), np.int32)
        for row, own in enumerate(np.split(blocks, np.cumsum(needed)[:-1])):
            tables[row, : len(own)] = own
        shape = (len(blocks), BLOCK_SIZE, self.heads.num_kv_heads, self.heads.head_dim)
        cache = tuple(torch.full(shape, float("nan"), dtype=self.dtype, device="cuda") for _ in range(2))
        width = self.heads.num_heads, self.heads.head_dim
        results = [torch.full((n, *width), float("nan"), dtype=self.dtype, device="cuda") for n in self.lengths]
        for step in schedule:
            used = [s for s, _, _ in step]
            positions = np.concatenate([np.arange(a, b) for _, a, b in step])
            ids = np.repeat(np.arange(len(step)), [b - a for _, a, b in step])
            slots = tables[used][ids, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            num_single, tiles = tile(ids, tokens_per_tile(self.heads))
            longest = int(positions[:num_single].max(initial=0)) + 1
            put = [torch.from_numpy(array).cuda() for array in (positions, ids, tables[used], slots)]
            inputs = TiledInputs(*put, num_single, torch.from_numpy(tiles).cuda(), longest)
            qkv = torch.cat([self.qkv[s][a:b] for s, a, b in step])
            rotation = torch.ones(len(qkv), width[1]).cuda(), torch.zeros(len(qkv), width[1]).cuda()
            q = kernels.rotate_and_store(qkv, self.heads, rotation, cache, inputs)
            y = kernels.attention(q, cache, self.heads, inputs, window)
            for (s, a, b), part in zip(step, y.split([b - a for _, a, b in step]), strict=True):
                results[s][a:b] = part
        return results

    def expected(self, window: int | None) -> list[torch.Tensor]:
        """Return plain attention in float64."""
        heads, kv_heads, width = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim
        results = []
        for qkv in self.qkv:
            q, k, v = (
                qkv.double().unflatten(-1, (-1, width))[:, : heads + 2 * kv_heads].split((heads, kv_heads, kv_heads), 1)
            )
            k, v = k[:, self.heads.kv_index], v[:, self.heads.kv_index]
            distance = torch.arange(len(q), device="cuda")[:, None] - torch.arange(len(q), device="cuda")
            hidden = (distance < 0) | (distance >= (window or len(q)))
            scores = torch.einsum("chd,lhd->hcl", q, k) * width**-0.5
            results.append(torch.einsum("hcl,lhd->chd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return results


SCHEDULES = {
    "together": [[(0, 0, 1), (1, 0, 70), (2, 0, 333), (3, 0, 600)]],
    "token by token": [[(s, i, i + 1) for s, n in enumerate((1, 70, 333, 600)) if i < n] for i in range(600)],
    "chunks": [
        [(1, 0, 30)],
        [(3, 0, 257), (2, 0, 5)],
        [(1, 30, 31), (0, 0, 1), (2, 5, 333)],
        [(3, 257, 600), (1, 31, 70)],
    ],
}


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("groups", "width"), [([4] * 2, 128), ([2, 3], 64), ([1, 1, 1], 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_any_schedule(kernels_for, groups, width, window, dtype):
    paged = Paged([1, 70, 333, 600], groups, width, dtype)
    paged.qkv = [qkv[:, : (sum(groups) + 2 * len(groups)) * width].contiguous() for qkv in paged.qkv]
    by_schedule = {name: paged.run(kernels_for(True), schedule, window) for name, schedule in SCHEDULES.items()}
    for result, expected in zip(by_schedule["together"], paged.expected(window), strict=True):
        assert_close(result, expected)
    for name in ("token by token", "chunks"):
        for result, together in zip(by_schedule[name], by_schedule["together"], strict=True):
            assert torch.equal(result, together), name
    for result, expected in zip(
        paged.run(kernels_for(False), SCHEDULES["chunks"], window), paged.expected(window), strict=True
    ):
        assert_close(result, expected)
