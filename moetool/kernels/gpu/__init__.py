"""Triton kernels of a GPU."""
