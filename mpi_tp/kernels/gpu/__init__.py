"""Triton kernels for NVIDIA GPUs, one operation a file; `mpi_tp.kernels.gpu_kernels` puts them together."""
