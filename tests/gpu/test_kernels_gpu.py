"""The GPU's kernels against plain torch in float64; what the invariant ones promise is in test_promises_gpu.py."""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton, which comes with torch for CUDA")

from mpi_tp.kernels.gpu_kernels import GpuKernels
from tests.support import gpu_checks
from tests.support.paged_sequences import PagedSequences

BOTH = pytest.mark.parametrize("kernels", [GpuKernels(True), GpuKernels(False)], ids=["invariant", "fast"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.parametrize("sizes", [(1, 576, 97), (40, 131, 70), (300, 576, 70), (0, 8, 16)], ids=str)
@DTYPES
@BOTH
def test_products(kernels, dtype, sizes, device):
    gpu_checks.check_linear(kernels, device, dtype, sizes, biased=True)
    gpu_checks.check_gated_linear(kernels, device, dtype, sizes, biased=True)


@DTYPES
@BOTH
def test_embedding_and_norms(kernels, dtype, device):
    gpu_checks.check_embedding(kernels, device, dtype, 576)
    gpu_checks.check_norms(kernels, device, dtype, (37, 576))


@pytest.mark.parametrize(("groups", "width", "normed"), [((2, 3), 128, True), ((2, 2, 4), 80, False)])
@DTYPES
@BOTH
def test_rotate_and_store(kernels, dtype, groups, width, normed, device):
    gpu_checks.check_rotate_and_store(kernels, device, dtype, groups, width, normed)


@DTYPES
def test_tokens(dtype, device):
    kernels = GpuKernels(False)
    gpu_checks.check_best_token(kernels, device, dtype)
    gpu_checks.check_choose_token(kernels, device)
    gpu_checks.check_resolve(device)


@pytest.mark.parametrize("schedule", ["chunks", "together"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("groups", "width"), [((4, 4), 128), ((2, 3), 64), ((1, 1, 1), 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@BOTH
def test_attention(kernels, dtype, groups, width, window, schedule, device):
    sequences = PagedSequences([1, 70, 333, 600], groups, width, device, dtype)
    results = sequences.run(kernels.attention, sequences.schedules()[schedule], window)
    for y, expected in zip(results, sequences.expected(window), strict=True):
        gpu_checks.assert_close(y.cpu(), expected, 3, 600)
