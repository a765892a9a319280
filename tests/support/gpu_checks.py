"""Checks of the GPU's kernels against plain torch in float64, on any device."""

import math

import numpy as np
import torch

from mpi_tp.kernels.base import AttentionHeads
from mpi_tp.kernels.gpu.tokens import resolve
from mpi_tp.kernels.gpu_kernels import GpuKernels
from mpi_tp.kernels.torch_kernels import TorchKernels
from tests.unit.test_kernels import paged, random

TWIN = TorchKernels()
FLOAT32_STEP = 2.0**-22
"""What an operation in float32 may err, relative to its result: four units of the last place, for approximations."""


def assert_close(y: torch.Tensor, expected: torch.Tensor, roundings: int, terms: int = 1) -> None:
    """Compare as whole vectors: ||y - expected|| is small beside ||expected||.

    A rounding to y's dtype moves a number by half an eps at most. The errors of a sum of `terms` random numbers in
    float32 are as good as independent, so they grow as the root.
    """
    assert y.shape == expected.shape
    bound = roundings * torch.finfo(y.dtype).eps / 2 + math.sqrt(terms) * FLOAT32_STEP
    assert (y.double() - expected).norm() <= bound * expected.norm()


def randoms(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [random(seed, *shape).to(device, dtype) for seed, shape in enumerate(shapes)]


def uneven_heads(
    groups: tuple[int, ...], width: int, device: torch.device, norms: tuple[torch.Tensor, ...] = ()
) -> AttentionHeads:
    """Return heads of which `groups[g]` share key/value head g."""
    kv_index = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups)).to(device)
    return AttentionHeads(kv_index, len(groups), width, *norms, norm_eps=1e-5)


def check_linear(
    kernels: GpuKernels, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], biased: bool
) -> None:
    """`sizes`: rows, inputs, outputs."""
    tokens, inputs, outputs = sizes
    x, weight, bias = randoms(device, dtype, (tokens, inputs), (outputs, inputs), (outputs,))
    y = kernels.linear(x, kernels.prepare(weight), bias if biased else None)
    assert y.dtype == dtype
    assert_close(y, TWIN.linear(x.double(), weight.double(), bias.double() if biased else None), 1, inputs)


def check_gated_linear(
    kernels: GpuKernels, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], biased: bool
) -> None:
    """Gate, silu, up and product are rounded; silu makes the error of a large gate up to 1.28 times as large."""
    tokens, inputs, outputs = sizes
    x, gate, up, bias = randoms(device, dtype, (tokens, inputs), (outputs, inputs), (outputs, inputs), (2 * outputs,))
    y = kernels.gated_linear(x, kernels.prepare_gated(gate, up), bias if biased else None)
    assert y.dtype == dtype
    weight = TWIN.prepare_gated(gate.double(), up.double())
    assert_close(y, TWIN.gated_linear(x.double(), weight, bias.double() if biased else None), 5, 4 * inputs)


def check_embedding(kernels: GpuKernels, device: torch.device, dtype: torch.dtype, inputs: int) -> None:
    [weight] = randoms(device, dtype, (37, inputs))
    ids = torch.tensor([5, 99, 100, 116, 136, 137, 120, -1], device=device)
    rows = kernels.embedding(ids, kernels.prepare(weight), 100)
    assert rows.dtype == dtype
    assert torch.equal(rows, TWIN.embedding(ids, weight, 100))
    assert not kernels.embedding(ids, kernels.prepare(weight[:0]), 100).any()
    assert kernels.embedding(ids[:0], kernels.prepare(weight), 100).shape == (0, inputs)


def check_norms(kernels: GpuKernels, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, delta, weight = randoms(device, dtype, shape, shape, shape[-1:])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_close(kernels.rms_norm(x, weight, 1e-5), expected, 2, 4)
    total = x + delta
    added, normed = kernels.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(added, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


def check_rotate_and_store(
    kernels: GpuKernels, device: torch.device, dtype: torch.dtype, groups: tuple[int, ...], width: int, normed: bool
) -> None:
    """A head is rounded once, and twice more by its norm; nothing but the tokens' slots is written."""
    inputs, blocks = paged([3, 20, 1], [3, 2, 1], 16, seed=1)
    num_heads, size = sum(groups), width * (sum(groups) + 2 * len(groups))
    qkv, angles, *norms = randoms(device, dtype, (6, size), (6, width // 2), (width,), (width,))
    angles = angles.float()
    rotation = tuple(torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    inputs = type(inputs)(*(part.to(device) for part in vars(inputs).values()))
    shape = blocks, 16, len(groups), width
    cache = torch.full(shape, 7.0, device=device, dtype=dtype), torch.full(shape, 8.0, device=device, dtype=dtype)
    expected = tuple(part.double() for part in cache)
    heads = uneven_heads(groups, width, device, tuple(norms) if normed else ())
    wide_heads = uneven_heads(groups, width, device, tuple(norm.double() for norm in norms) if normed else ())
    y = kernels.rotate_and_store(qkv, heads, rotation, cache, inputs)
    wide_rotation = tuple(part.double() for part in rotation)
    y_expected = TWIN.rotate_and_store(qkv.double(), wide_heads, wide_rotation, expected, inputs)
    assert y.shape == (6, num_heads, width)
    assert_close(y, y_expected, 3 if normed else 1, 4)
    untouched = torch.ones(blocks * 16, dtype=torch.bool, device=device)
    untouched[inputs.slots] = False
    for stored, theirs in zip(cache, expected, strict=True):
        ours = stored.view(blocks, len(groups), 16, width).transpose(1, 2).flatten(0, 1)
        assert_close(ours[inputs.slots], theirs.flatten(0, 1)[inputs.slots], 3 if normed else 1, 4)
        assert torch.equal(ours[untouched].double(), theirs.flatten(0, 1)[untouched])


def check_best_token(kernels: GpuKernels, device: torch.device, dtype: torch.dtype) -> None:
    """Against numpy, whose argmax too takes the first of equals, and of NaNs."""
    x = (random(1, 9, 2 * 4096 + 5) * 4).round()
    x[1, 5000], x[2, [7, 8196]], x[3, :], x[4, 4095:] = math.nan, math.nan, -math.inf, 99
    x[5, 8196] = math.inf
    best = kernels.best_token(x.to(device, dtype), 100).cpu().numpy()
    columns = x.to(dtype).float().numpy().argmax(-1)
    assert (best[:, 1] == columns + 100).all()
    np.testing.assert_array_equal(best[:, 0], x.to(dtype).float().numpy()[np.arange(9), columns])
    assert kernels.best_token(x[:, :0].to(device, dtype), 7)[:, 0].tolist() == [-math.inf] * 9
    assert kernels.best_token(x[:0].to(device, dtype), 7).shape == (0, 2)
    one = kernels.best_token(x[:, :1].to(device, dtype), 7)
    assert one[:, 1].tolist() == [7.0] * 9


def check_choose_token(kernels: GpuKernels, device: torch.device) -> None:
    pairs = [[[1.0, 5.0], [2.0, 50.0]], [[2.0, 6.0], [2.0, 60.0]], [[3.0, 7.0], [math.nan, 70.0]], [[9.0, 8.0]] * 2]
    pairs += [[[math.inf, 9.0], [0.0, 90.0]], [[-math.inf, 0.0], [-3.0, 2.0**24 - 1]], [[-math.inf, 0.0]] * 2]
    best = torch.tensor(pairs, device=device)
    assert kernels.choose_token(best).tolist() == [50, 6, -1, 8, -1, 2**24 - 1, -1]
    assert kernels.choose_token(torch.cat((best, best[:, :1]), 1)).tolist() == [50, 6, -1, 8, -1, 2**24 - 1, -1]
    assert kernels.choose_token(best[:, :1].contiguous()).tolist() == [5, 6, 7, 8, -1, -1, -1]
    assert kernels.choose_token(best[:0]).shape == (0,)


def check_resolve(device: torch.device) -> None:
    ids, last = (torch.tensor(values, device=device) for values in ([5, -1, 0, -4, -2], [10, -1, 12, 2**31]))
    assert resolve(ids, last).tolist() == [5, 10, 0, 2**31, -1]
    assert resolve(ids[:0], last).shape == (0,)
