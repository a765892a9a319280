"""What the invariant kernels promise, bit for bit, at the sizes of a large model and for ranks with any share of it."""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="no Triton, which comes with torch for CUDA")

from mpi_tp.kernels.gpu_kernels import GpuKernels
from tests.support import gpu_invariance
from tests.support.gpu_checks import randoms
from tests.support.paged_sequences import PagedSequences

KERNELS = GpuKernels(True)
BF16 = torch.bfloat16
EVERY_TILE = (1, 2, 16, 17, 33, 64, 65, 200, 257, 300)
CUTS = ((0, 1), (1, 4), (5, 69), (64, 128), (37, 130))
"""Of 130 columns: single ones and widths of no round number, first columns at any place."""
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
HEADS = pytest.mark.parametrize(
    ("dtype", "groups", "width"),
    [
        (BF16, (4, 4, 4), 128),
        (BF16, (2, 3), 24),
        (BF16, (5,), 12),
        (torch.float32, (2, 3), 24),
        (torch.float32, (1, 1), 80),
    ],
    ids=str,
)


@DTYPES
def test_a_row_among_up_to_300_others(dtype, device):
    x, weight, bias = randoms(device, dtype, (300, 576), (97, 576), (97,))
    linear = functools.partial(KERNELS.linear, weight=KERNELS.prepare(weight), bias_N=bias)
    gpu_invariance.check_rows(linear, x, range(1, 301))


@DTYPES
def test_columns_of_a_gated_product(dtype, device):
    x, gate, up = randoms(device, dtype, (300, 300), (130, 300), (130, 300))
    gpu_invariance.check_gated_columns(KERNELS, x, (gate, up), CUTS, (1, 40, 300))


def test_the_longest_sums_of_a_large_model(device):
    x, weight = randoms(device, BF16, (300, 14336), (4096, 14336))
    linear = functools.partial(KERNELS.linear, weight=KERNELS.prepare(weight))
    gpu_invariance.check_rows(linear, x, EVERY_TILE)
    gpu_invariance.check_linear_columns(KERNELS, x, weight, ((0, 1365), (1365, 2731), (2731, 4096)), (1, 40, 300))


def test_the_most_columns_of_a_large_model(device):
    x, gate = randoms(device, BF16, (300, 4096), (14336, 4096))
    weights = gate, gate.flip(0)
    gated = functools.partial(KERNELS.gated_linear, weight=KERNELS.prepare_gated(*weights))
    gpu_invariance.check_rows(gated, x, EVERY_TILE)
    cuts = ((0, 4779), (4779, 9557), (9557, 14336))
    gpu_invariance.check_gated_columns(KERNELS, x, weights, cuts, (1, 40, 300))


@pytest.mark.parametrize("size", [60, 4096])
def test_rows_of_a_norm(size, device):
    x, weight = randoms(device, BF16, (300, size), (size,))
    gpu_invariance.check_rows(functools.partial(KERNELS.rms_norm, weight=weight, eps=1e-5), x, EVERY_TILE)


@HEADS
def test_rotated_tokens(dtype, groups, width, device):
    gpu_invariance.check_rotation_rows(KERNELS, device, dtype, groups, width, normed=True)


@HEADS
@pytest.mark.parametrize("window", [None, 100])
def test_attention_in_any_company_and_over_some_of_the_heads(dtype, window, groups, width, device):
    sequences = PagedSequences([300, 1, 130, 64, 17, 129], groups, width, device, dtype)
    gpu_invariance.check_attention(KERNELS, sequences, window)
