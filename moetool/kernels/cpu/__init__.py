"""Kernels of a CPU: products by stored form, attention, gates.

matmul                       products of linear layers and experts; chooses the kernel by the number of rows
compiled, dots               kernels of few rows of bfloat16, FP8, int8, MXFP4, NVFP4 and GGUF blocks
kinds, numbers, blocks       what these forms are, their numbers as float32, the order of x; ggml_* for GGUF blocks
scaled_weight                weights in these forms, with their scales
tiles                        kernels of more rows, on a CPU with AMX, AVX-512 or AVX2
int4                         torch's kernel for packed integers
attention                    new tokens over a paged KV cache
activations, gates           functions of rows, and gated products
inputs, threads, vectors, huge_pages  common parts
"""
