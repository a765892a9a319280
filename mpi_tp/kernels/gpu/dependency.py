"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A kernel that is launched so may fetch weights at once, but must call `wait_for_inputs` before it reads what an earlier
kernel wrote and before its first store. Where `let_next_start` comes first, several kernels ahead may fetch already
while one with little to do, a norm say, leaves the memory idle; each still waits until the one before it is done. A
program may return without waiting as long as one of its grid waits: a kernel relies on all those before it.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one are done and their stores are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start, once all programs of this one have said so."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Start to bring what the pointers show into the second-level cache; it need not be written yet."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def launch_options() -> dict[str, Any]:
    """Return how kernels are launched on this machine: compute capability 9.0 and newer know dependent launches."""
    dependent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}
