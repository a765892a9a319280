"""Where there is no GPU, its kernels run in Triton's interpreter, which is to be told before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
