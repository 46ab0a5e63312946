"""Compiled kernels of a CPU."""
