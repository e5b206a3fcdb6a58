"""The CUDA backend: Triton kernels and cuBLAS. Each kernel is tested against `kernels.reference`."""
