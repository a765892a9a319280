"""Products with a weight, y = x · Wᵀ and silu(x · gateᵀ) * (x · upᵀ), for any number of rows.

Every sum runs on the tensor cores (in float32 on the plain ones) in the order of k, from the first term to the last, in
one program. The weight is the left operand and the rows of x are columns of the right one, so the instruction is the
same for one row and for thousands: the bits of a row depend neither on the rows beside it nor on the columns that this
rank holds. Tiles come through the tensor memory accelerator, several ahead.

`multiply_row` gives up that promise for speed: one row on the plain cores, at the speed at which memory is read.

Shape suffixes as in base.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, wait_for_inputs

ALIGNMENT = 16
"""Bytes that a row's length must be a multiple of for the tensor memory accelerator."""
BAND = 8
"""Tiles of columns that run beside each other, so that they find the same rows of x in the second-level cache."""


@dataclass(frozen=True)
class Tile:
    """How a product is cut: columns, rows and terms of a step, and how the program runs."""

    columns: int
    rows: int
    terms: int
    num_warps: int
    num_stages: int


class Weight:
    """A weight [N, K], or gate and up as one [2N, K], its rows padded with zeros to whole units of ALIGNMENT."""

    def __init__(self, weight_NK: torch.Tensor, gated: bool) -> None:
        self.gated = gated
        self.num_inputs = weight_NK.shape[1]
        padding = -self.num_inputs % (ALIGNMENT // weight_NK.itemsize)
        self.tensor = functional.pad(weight_NK, (0, padding)) if padding else weight_NK.contiguous()
        self.num_outputs = len(weight_NK) // (1 + gated)
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def descriptor(self, tile: Tile) -> TensorDescriptor:
        """Return the weight as tiles of columns and terms."""
        block = tile.columns, tile.terms
        if block not in self._descriptors:
            self._descriptors[block] = TensorDescriptor.from_tensor(self.tensor, list(block))
        return self._descriptors[block]


def choose_tile(num_rows: int, gated: bool, itemsize: int) -> Tile:
    """Return the tile for x of `num_rows` rows; it decides about speed alone."""
    terms = 2 if itemsize < 4 else 1
    if num_rows <= 32:
        rows = 16 if num_rows <= 16 else 32
        return Tile(64, rows, 64 * terms, 4, 4) if gated else Tile(64, rows, 128 * terms, 4, 4 if itemsize < 4 else 3)
    if num_rows <= 64:
        return Tile(64, 64, 64 * terms, 4, 4 if gated else 6)
    if num_rows <= 256:
        return Tile(64, 128, 32 * terms, 4, 4)
    return Tile(128, 128 if gated else 256, 32 * terms, 8, 4)


@triton.jit
def _silu_mul(gate, up, DTYPE: tl.constexpr):
    """Return silu(gate) * up in float32, rounded in between where Hugging Face's models round."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return (gate / (1 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up


@triton.jit
def _product_kernel(
    x, w, bias, y, T, N, K,
    GATED: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr,
    BAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile [ROWS, COLUMNS] of y, its products as [COLUMNS, ROWS]."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    blocks_t = tl.cdiv(T, ROWS)
    program = tl.program_id(0)
    band = program // (BAND * blocks_t) * BAND
    height = min(tl.cdiv(N, COLUMNS) - band, BAND)
    first_n = (band + program % (BAND * blocks_t) % height) * COLUMNS
    first_t = program % (BAND * blocks_t) // height * ROWS
    n = first_n + tl.arange(0, COLUMNS)
    t = first_t + tl.arange(0, ROWS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    up_acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, K, TERMS):
        x_tile = x.load([first_t, k]).T
        acc = tl.dot(w.load([first_n, k]), x_tile, acc, input_precision="ieee")
        if GATED:
            up_acc = tl.dot(w.load([N + first_n, k]), x_tile, up_acc, input_precision="ieee")
    in_n = n < N
    if BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up_acc += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        acc = _silu_mul(acc, up_acc, DTYPE)
    place = y + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, tl.trans(acc).to(DTYPE), mask=in_n[None, :] & (t < T)[:, None])


@triton.jit
def _row_kernel(
    x, w, bias, y, N, K,
    GATED: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one row by COLUMNS rows of the weight; the first weights are on their way before x is there."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, TERMS)
    in_n = n < N
    w_NK = w + n.to(tl.int64)[:, None] * K + k[None, :]
    up_NK = w + (N + n).to(tl.int64)[:, None] * K + k[None, :]
    mask = in_n[:, None] & (k < K)[None, :]
    tile = tl.load(w_NK, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_tile = tl.load(up_NK, mask=mask, other=0.0, eviction_policy="evict_first")
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x_K = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    acc = tile.to(tl.float32) * x_K
    if GATED:
        up_acc = up_tile.to(tl.float32) * x_K
    for start in range(TERMS, K, TERMS):
        mask = in_n[:, None] & (k < K - start)[None, :]
        x_K = tl.load(x + start + k, mask=k < K - start, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(w_NK + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x_K
        if GATED:
            up_tile = tl.load(up_NK + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc += up_tile.to(tl.float32) * x_K
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        up_total = tl.sum(up_acc, 1)
        if BIAS:
            up_total += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)
        total = _silu_mul(total, up_total, DTYPE)
    tl.store(y + n, total.to(DTYPE), mask=in_n)


def multiply(x_TK: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x · weightᵀ + bias [T, N], or the gated product of gate and up; the bits of a row are its own."""
    x_TK = _padded(x_TK, weight)
    size, inputs = x_TK.shape
    y_TN = x_TK.new_empty(size, weight.num_outputs)
    tile = choose_tile(size, weight.gated, x_TK.itemsize)
    x = TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.terms])
    grid = (triton.cdiv(weight.num_outputs, tile.columns) * triton.cdiv(size, tile.rows),)
    _product_kernel[grid](
        x, weight.descriptor(tile), weight.tensor if bias is None else bias, y_TN,
        size, weight.num_outputs, inputs, GATED=weight.gated, BIAS=bias is not None, COLUMNS=tile.columns,
        ROWS=tile.rows, TERMS=tile.terms, BAND=BAND, num_warps=tile.num_warps,
        num_stages=tile.num_stages, enable_fp_fusion=False, **launch_options(),
    )  # fmt: skip
    return y_TN


def multiply_row(x_1K: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Do what `multiply` does for one row, faster and with other bits."""
    x_1K = _padded(x_1K, weight)
    outputs, inputs = weight.num_outputs, x_1K.shape[1]
    y_1N = x_1K.new_empty(1, outputs)
    # The whole row in one go, or pieces of it: what was fastest for rows of 4,096 and of 14,336.
    terms = min(triton.next_power_of_2(inputs), 4096) if inputs <= 8192 else 1024
    columns = max(1, 1024 // terms)
    _row_kernel[(triton.cdiv(outputs, columns),)](
        x_1K, weight.tensor, weight.tensor if bias is None else bias, y_1N, outputs, inputs,
        GATED=weight.gated, BIAS=bias is not None, COLUMNS=columns, TERMS=terms, num_warps=4, **launch_options(),
    )  # fmt: skip
    return y_1N


def _padded(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    padding = weight.tensor.shape[1] - weight.num_inputs
    return functional.pad(x_TK, (0, padding)) if padding else x_TK.contiguous()
