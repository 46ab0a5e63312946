"""Huge pages for weights: with pages of 4 KiB a processor reads them more slowly, as address translations are missing
(`tests/bench/test_row_products.py`)."""

import ctypes
import functools
import sys
from typing import Any

import torch

HUGE_PAGE_BYTES = 2**21
_HUGEPAGE, _COLLAPSE = 14, 25  # of <linux/mman.h>


def ask_for_huge_pages(memory: torch.Tensor, *, collapse: bool = False) -> bool:
    """Have the system back memory of a tensor with huge pages, where it can; gives whether it agreed.

    Args:
        memory: contiguous, on the CPU. Only the whole huge pages inside it are asked for.
        collapse: memory that has been written to already is copied into huge pages now.

    Effects: none on the contents.
    """
    start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length <= 0 or (advise := _advise()) is None:
        return False
    agreed = advise(start, length, _HUGEPAGE) == 0
    return agreed and (not collapse or advise(start, length, _COLLAPSE) == 0)


@functools.cache
def _advise() -> Any:
    """The C library's `madvise`; None on other systems than Linux."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
