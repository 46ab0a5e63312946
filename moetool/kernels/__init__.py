"""Products, attention and norms over stored numbers. They know arrays and formats, and no models.

cpu/                         kernels that numba compiles, and torch's for int4
gpu/                         kernels in Triton
slot_products                products over the slots of a pool by torch; slot_backends chooses between them and Triton's
packed_part                  packed weights in slots
unpacking                    low-bit values to numbers
norms                        RMSNorm on a CPU and a GPU
"""
