"""Rows of a vocabulary that is split over the ranks; one program a token."""

import torch
import triton
import triton.language as tl

from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _embedding_kernel(ids, w, y, start, N, K, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the row of one token, or zeros if this rank does not hold it."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token) - start
    k = tl.arange(0, BLOCK)
    known = tl.where((row >= 0) & (row < N), K, 0)
    tl.store(y + token * K + k, tl.load(w + row * stride + k, mask=k < known, other=0.0), mask=k < K)


def embed(ids_T: torch.Tensor, weight_NK: torch.Tensor, num_inputs: int, start: int) -> torch.Tensor:
    """Return rows [T, K] of the ids in start … start + N - 1 (int64), zeros for the others."""
    y_TK = weight_NK.new_empty(len(ids_T), num_inputs)
    if len(ids_T):
        _embedding_kernel[(len(ids_T),)](
            ids_T, weight_NK, y_TK, start, len(weight_NK), num_inputs, weight_NK.stride(0),
            BLOCK=triton.next_power_of_2(num_inputs), num_warps=4, **launch_options(),
        )  # fmt: skip
    return y_TK
