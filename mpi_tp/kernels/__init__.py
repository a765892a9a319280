"""The arithmetic of the model: one interface, one implementation per device and promise about numerics.

    base.py            the operations, and what each of them means
    choice.py          the likeliest token of a split vocabulary, in plain torch
    torch_kernels.py   plain torch: `fast` on CPU, and the definition that the others are measured against
    invariant.py       compiled for this CPU: the bits of a row depend on that row and the weights alone (`invariant`);
                       its loops are in invariant_*.py, and what numba lacks for them in vectors, product and memory.py
    gpu_kernels.py     Triton for NVIDIA GPUs, `invariant` or `fast`; the kernels are in gpu/

Importing this package compiles nothing; a compiler is imported when `select` first returns kernels that need it.
"""

import torch

from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels.base import Kernels
from mpi_tp.kernels.torch_kernels import TorchKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_invariant(device: torch.device, numerics: str) -> bool:
    """Return what numerics, which is auto, invariant or fast, means on `device`."""
    return numerics == "invariant" or (numerics == "auto" and device.type == "cpu")


def select(device: torch.device, numerics: str, dtype: torch.dtype) -> Kernels:
    """Return the kernels for weights of `dtype` on `device`; `numerics` is auto, invariant or fast.

    `auto` means invariant on the CPU and fast on a GPU. Raises ConfigurationError where there is no such kernel.
    """
    invariant = is_invariant(device, numerics)
    if device.type == "cpu" and not invariant:
        return TorchKernels()
    if dtype not in DTYPES:
        advice = ": use --numerics fast" if device.type == "cpu" else ""
        raise ConfigurationError(f"these kernels take float32, bfloat16 or float16 weights, not {dtype}{advice}")
    if device.type == "cpu":
        from mpi_tp.kernels.invariant import InvariantKernels

        return InvariantKernels()
    try:
        from mpi_tp.kernels.gpu_kernels import GpuKernels
    except ImportError as error:
        raise ConfigurationError(f"a GPU needs Triton, which comes with torch for CUDA ({error})") from error
    return GpuKernels(invariant)
