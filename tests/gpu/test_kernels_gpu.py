"""The kernels on a GPU: how far they are from float64, and the promise of `invariant`, bit for bit."""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="no Triton, which comes with torch for CUDA")

from mpi_tp.kernels.gpu_kernels import GpuKernels
from tests.support import gpu_checks, gpu_invariance
from tests.support.gpu_checks import randoms
from tests.support.paged_sequences import PagedSequences

INVARIANT = GpuKernels(True)
BOTH = pytest.mark.parametrize("kernels", [INVARIANT, GpuKernels(False)], ids=["invariant", "fast"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# A product in float32 takes Triton many seconds to compile, and each kind of size is a program of its own.
PRODUCTS = pytest.mark.parametrize(
    ("dtype", "sizes", "biased"),
    [
        (dtype, sizes, biased)
        for dtype in (torch.bfloat16, torch.float16)
        for sizes, biased in (
            ((3, 1, 5), False),
            ((0, 8, 16), True),
            ((4, 0, 3), False),
            ((1, 576, 97), True),
            ((20, 300, 64), True),
            ((60, 60, 257), False),
            ((150, 576, 33), True),
            ((300, 60, 130), False),
        )
    ]
    + [
        (torch.float32, (1, 576, 97), True),
        (torch.float32, (20, 300, 64), True),
        (torch.float32, (300, 60, 130), False),
    ],
    ids=str,
)
HEADS = pytest.mark.parametrize(("groups", "width"), [((4, 4, 4), 128), ((2, 3), 24), ((5,), 12)], ids=str)
ATTENTIONS = pytest.mark.parametrize(
    ("dtype", "groups", "width"),
    [
        (torch.bfloat16, (4, 4, 4), 128),
        (torch.bfloat16, (2, 3), 24),
        (torch.bfloat16, (5,), 12),
        (torch.float32, (2, 3), 24),
        (torch.float16, (2, 3), 64),
    ],
    ids=str,
)
EVERY_TILE = (1, 2, 16, 17, 33, 64, 65, 200, 257, 300)
CUTS = ((0, 1), (1, 4), (5, 69), (64, 128), (37, 130))
"""Of 130 columns: single ones and widths of no round number, first columns at any place."""


@PRODUCTS
@BOTH
def test_linear(kernels, dtype, sizes, biased, device):
    gpu_checks.check_linear(kernels, device, dtype, sizes, biased)


@PRODUCTS
@BOTH
def test_gated_linear(kernels, dtype, sizes, biased, device):
    gpu_checks.check_gated_linear(kernels, device, dtype, sizes, biased)


@BOTH
def test_products_of_a_large_model(kernels, device):
    for tokens in (1, 40, 300):
        gpu_checks.check_linear(kernels, device, torch.bfloat16, (tokens, 14336, 4096), False)
        gpu_checks.check_gated_linear(kernels, device, torch.bfloat16, (tokens, 4096, 14336), False)


@DTYPES
def test_embedding(dtype, device):
    for inputs in (16, 33, 4096):
        gpu_checks.check_embedding(INVARIANT, device, dtype, inputs)


@DTYPES
def test_norms(dtype, device):
    for shape in ((1, 4096), (5, 7, 60), (3, 1), (0, 16)):
        gpu_checks.check_norms(INVARIANT, device, dtype, shape)


@HEADS
@pytest.mark.parametrize("normed", [False, True])
@DTYPES
def test_rotate_and_store(dtype, normed, groups, width, device):
    gpu_checks.check_rotate_and_store(INVARIANT, device, dtype, groups, width, normed)


@ATTENTIONS
@pytest.mark.parametrize("window", [None, 100])
@BOTH
def test_attention(kernels, dtype, window, groups, width, device):
    """Weights, their products with values and results are rounded."""
    sequences = PagedSequences([290, 1, 150], groups, width, device, dtype)
    for name in ("together", "chunks"):
        results = sequences.run(kernels.attention, sequences.schedules()[name], window)
        for y, expected in zip(results, sequences.expected(window), strict=True):
            gpu_checks.assert_close(y.cpu(), expected, 3, 290)


@DTYPES
def test_tokens(dtype, device):
    gpu_checks.check_best_token(INVARIANT, device, dtype)
    gpu_checks.check_choose_token(INVARIANT, device)
    gpu_checks.check_resolve(device)


@TWO_DTYPES
def test_a_product_row_is_its_own(dtype, device):
    x, weight, bias = randoms(device, dtype, (300, 576), (97, 576), (97,))
    linear = functools.partial(INVARIANT.linear, weight=INVARIANT.prepare(weight), bias_N=bias)
    gpu_invariance.check_rows(linear, x, range(1, 301) if dtype == torch.bfloat16 else (2, 40, 300))


@TWO_DTYPES
def test_a_gated_product_row_is_its_own(dtype, device):
    x, gate, up = randoms(device, dtype, (300, 60), (100, 60), (100, 60))
    gated = functools.partial(INVARIANT.gated_linear, weight=INVARIANT.prepare_gated(gate, up))
    gpu_invariance.check_rows(gated, x, EVERY_TILE if dtype == torch.bfloat16 else (20, 300))


@TWO_DTYPES
def test_product_columns_are_those_of_the_whole(dtype, device):
    x, weight, up = randoms(device, dtype, (300, 300), (130, 300), (130, 300))
    gpu_invariance.check_linear_columns(INVARIANT, x, weight, CUTS, (1, 40, 300) if dtype == torch.bfloat16 else (40,))
    if dtype == torch.bfloat16:
        gpu_invariance.check_gated_columns(INVARIANT, x, (weight, up), CUTS, (1, 40, 300))


def test_products_of_a_large_model_are_invariant(device):
    """Down: the longest sums; gate and up: the most columns, in uneven thirds."""
    x, weight = randoms(device, torch.bfloat16, (300, 14336), (4096, 14336))
    linear = functools.partial(INVARIANT.linear, weight=INVARIANT.prepare(weight))
    gpu_invariance.check_rows(linear, x, EVERY_TILE)
    gpu_invariance.check_linear_columns(INVARIANT, x, weight, ((0, 1365), (1365, 2731), (2731, 4096)), (1, 40, 300))
    x, gate = randoms(device, torch.bfloat16, (300, 4096), (14336, 4096))
    gated = functools.partial(INVARIANT.gated_linear, weight=INVARIANT.prepare_gated(gate, gate.flip(0)))
    gpu_invariance.check_rows(gated, x, EVERY_TILE)
    cuts = ((0, 4779), (4779, 9557), (9557, 14336))
    gpu_invariance.check_gated_columns(INVARIANT, x, (gate, gate.flip(0)), cuts, (1, 40, 300))


@TWO_DTYPES
def test_norm_rows_are_their_own(dtype, device):
    for size in (60, 4096):
        x, weight = randoms(device, dtype, (300, size), (size,))
        gpu_invariance.check_rows(functools.partial(INVARIANT.rms_norm, weight=weight, eps=1e-5), x, EVERY_TILE)


@HEADS
@TWO_DTYPES
def test_rotation_rows_are_their_own(dtype, groups, width, device):
    gpu_invariance.check_rotation_rows(INVARIANT, device, dtype, groups, width, normed=True)


@ATTENTIONS
@pytest.mark.parametrize("window", [None, 100])
def test_attention_in_any_company_schedule_and_over_any_heads(dtype, window, groups, width, device):
    sequences = PagedSequences([300, 1, 130, 64, 17, 129], groups, width, device, dtype)
    gpu_invariance.check_attention(INVARIANT, sequences, window)
