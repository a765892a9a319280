"""RMSNorm, alone or after a residual addition; one program a row.

Shape suffixes as in base.py.
"""

import torch
import triton
import triton.language as tl

from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x, delta, weight, total, y, K, EPS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Normalise one row of x, or of x + delta."""
    k = tl.arange(0, BLOCK)
    in_row = k < K
    weight_K = tl.load(weight + k, mask=in_row, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * K
    x_K = tl.load(x + row + k, mask=in_row, other=0.0)
    if ADD:
        x_K = (x_K.to(tl.float32) + tl.load(delta + row + k, mask=in_row, other=0.0).to(tl.float32)).to(x_K.dtype)
        tl.store(total + row + k, x_K, mask=in_row)
    wide_K = x_K.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide_K * wide_K) / K + EPS)
    # Rounded before the weight comes in, as Hugging Face's models do.
    tl.store(y + row + k, (wide_K * scale).to(x_K.dtype) * weight_K.to(x_K.dtype), mask=in_row)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., K] over its root mean square, times `weight` [K]; the statistics are in float32."""
    return _launch(x.contiguous(), None, weight, eps)[1]


def add_rms_norm(
    x_TK: torch.Tensor, delta_TK: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, which overwrites x, and its `rms_norm`."""
    return _launch(x_TK, delta_TK, weight_K, eps)


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    size, y = x.shape[-1], torch.empty_like(x)
    block = triton.next_power_of_2(size)
    if x.numel():
        _rms_norm_kernel[(x.numel() // size,)](
            x, x if delta is None else delta, weight, x, y, size, EPS=eps, BLOCK=block, ADD=delta is not None,
            num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
    return x, y
