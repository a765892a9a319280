"""The kernels for GPUs, each operation, in Triton's interpreter: slow, so everything is small."""

import functools

import numpy as np
import pytest
import torch

WHY = "the interpreter of older ones fails with numpy 2.4"
triton = pytest.importorskip("triton", minversion="3.7", reason=f"no Triton of 3.7 or newer: {WHY}")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is visible: tests/gpu runs these kernels on it", allow_module_level=True)

from mpi_tp.kernels.gpu import attention  # noqa: E402
from mpi_tp.kernels.gpu.tiles import TiledInputs, tile  # noqa: E402
from mpi_tp.kernels.gpu_kernels import FEW_ROWS, GpuKernels  # noqa: E402
from tests.support import gpu_checks  # noqa: E402
from tests.support.gpu_checks import uneven_heads  # noqa: E402
from tests.support.paged_sequences import PagedSequences  # noqa: E402
from tests.unit.test_kernels import random  # noqa: E402

# Rows of a tile that stand for no token are divided by their sum of zero, and not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("kernels", [GpuKernels(True), GpuKernels(False)], ids=["invariant", "fast"])
ALL_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
# The interpreter takes bfloat16 for whole numbers where it is multiplied.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
SIZES = pytest.mark.parametrize(
    ("sizes", "biased"),
    [
        ((1, 50, 97), True),
        ((1, 9000, 3), False),
        ((7, 33, 64), False),
        ((3, 1, 5), True),
        ((0, 8, 16), True),
        ((4, 0, 3), False),
        ((2, 9, 0), True),
        ((20, 8, 150), True),
        ((FEW_ROWS + 1, 20, 9), True),
        ((260, 9, 5), False),
    ],
)


@SIZES
@DTYPES
@BOTH
def test_linear(kernels, dtype, sizes, biased):
    gpu_checks.check_linear(kernels, CPU, dtype, sizes, biased)


@SIZES
@DTYPES
@BOTH
def test_gated_linear(kernels, dtype, sizes, biased):
    gpu_checks.check_gated_linear(kernels, CPU, dtype, sizes, biased)


@BOTH
def test_linear_takes_rows_with_gaps(kernels):
    x, weight = random(1, 6, 50), random(2, 33, 20)
    torch.testing.assert_close(kernels.linear(x[:, 10:30], kernels.prepare(weight)), x[:, 10:30] @ weight.T)


@ALL_DTYPES
@BOTH
@pytest.mark.parametrize("inputs", [16, 33])
def test_embedding_gives_exact_rows_and_zeros_elsewhere(kernels, dtype, inputs):
    gpu_checks.check_embedding(kernels, CPU, dtype, inputs)


@DTYPES
@BOTH
@pytest.mark.parametrize("shape", [(1, 576), (5, 7, 64), (3, 1), (0, 16)])
def test_norms(kernels, dtype, shape):
    gpu_checks.check_norms(kernels, CPU, dtype, shape)


@ALL_DTYPES
@BOTH
@pytest.mark.parametrize(("groups", "width", "normed"), [((2, 3), 8, True), ((2, 2, 4), 10, False)])
def test_rotate_and_store(kernels, dtype, groups, width, normed):
    gpu_checks.check_rotate_and_store(kernels, CPU, dtype, groups, width, normed)


@pytest.mark.parametrize(
    ("groups", "width", "window"),
    [((2, 3), 8, None), ((2, 3), 8, 1), ((2, 3), 8, 20), ((3, 3), 64, 20), ((17,), 6, None), ((1, 4), 80, 40)],
)
def test_attention(groups, width, window):
    """Single tokens and pieces of prompts, over several units of 16 keys each."""
    sequences = PagedSequences([50, 1, 7, 16], groups, width, CPU, torch.float32)
    attend = functools.partial(attention.attend, unit=16)
    results = sequences.run(attend, sequences.schedules()["chunks"], window)
    for y, expected in zip(results, sequences.expected(window), strict=True):
        gpu_checks.assert_close(y, expected, 3, 50)


@DTYPES
@BOTH
@pytest.mark.parametrize("window", [None, 100])
def test_attention_with_the_units_of_the_kernels(kernels, window, dtype):
    """The last tokens, each alone in its sequence, over keys that make several units."""
    sequences = PagedSequences([290, 1, 150], (2, 3), 16, CPU, dtype)

    def attend(q, cache, heads, inputs, window):
        return kernels.attention(q, cache, heads, inputs, window) if inputs.num_single else q

    steps = [[(0, 0, 289), (2, 0, 149)], [(0, 289, 290), (1, 0, 1), (2, 149, 150)]]
    for y, expected in zip(sequences.run(attend, steps, window), sequences.expected(window), strict=True):
        gpu_checks.assert_close(y[-1], expected[-1], 3, 290)


@BOTH
def test_attention_of_no_tokens(kernels):
    nothing = torch.zeros(0, dtype=torch.int64)
    inputs = TiledInputs(nothing, nothing, nothing.view(0, 1).int(), nothing, 0, nothing.view(0, 3).int(), 1)
    cache = torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8)
    y = kernels.attention(torch.zeros(0, 2, 8), cache, uneven_heads((2,), 8, CPU), inputs, None)
    assert y.shape == (0, 2, 8)


def test_tiles_hold_every_token_once():
    assert tile(np.array([0, 1, 2]), 4)[0] == 3
    num_single, tiles = tile(np.array([0, 1, 2, 2, 2, 2, 2, 3, 4, 4]), 4)
    assert num_single == 2
    assert tiles.tolist() == [[2, 4, 2], [6, 1, 2], [7, 1, 3], [8, 2, 4]]
    num_single, tiles = tile(np.zeros(0, np.int64), 4)
    assert (num_single, tiles.shape) == (0, (0, 3))


@ALL_DTYPES
@BOTH
def test_the_best_token_is_the_first_of_equals(kernels, dtype):
    gpu_checks.check_best_token(kernels, CPU, dtype)


@BOTH
def test_the_token_of_the_best_rank(kernels):
    gpu_checks.check_choose_token(kernels, CPU)


def test_references_to_the_step_before_are_resolved():
    gpu_checks.check_resolve(CPU)


@BOTH
@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "none"])
def test_activations_are_those_of_torch(kernels, name):
    x = random(1, 99)
    functions = {"none": torch.clone, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    assert torch.equal(kernels.activation(x, name), functions.get(name, getattr(torch, name, None))(x))
