"""The arithmetic of the model: one interface, one implementation per device and promise about numerics.

    base.py            the operations, and what each of them means
    torch_kernels.py   plain torch, CPU and CUDA: equal within rounding (`fast`)
    invariant.py       compiled for this CPU: the bits of a row depend on that row and the weights alone (`invariant`)

Importing this package compiles nothing; the compiler is imported when `select` first returns invariant kernels.
"""

import torch

from mpi_tp.errors import ConfigurationError
from mpi_tp.kernels.base import Kernels
from mpi_tp.kernels.torch_kernels import TorchKernels


def select(device: torch.device, numerics: str, dtype: torch.dtype) -> Kernels:
    """Return the kernels for weights of `dtype` on `device`; `numerics` is auto, invariant or fast.

    `auto` means invariant on the CPU and fast on a GPU. Raises ConfigurationError where there is no such kernel.
    """
    if numerics == "fast" or (numerics == "auto" and device.type == "cuda"):
        return TorchKernels()
    if device.type == "cuda":
        raise ConfigurationError(
            "--numerics invariant runs on the CPU only, but the device is cuda: use --numerics fast"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigurationError(
            f"--numerics invariant takes float32, bfloat16 or float16 weights, these are {dtype}: use --numerics fast"
        )
    from mpi_tp.kernels.invariant import InvariantKernels

    return InvariantKernels()
