"""Huge pages for weights: TLB misses slow down reads with 4 KiB pages (`tests/bench/test_row_products.py`)."""

import ctypes
import functools
import sys
from typing import Any

import torch

HUGE_PAGE_BYTES = 2**21
_HUGEPAGE, _COLLAPSE = 14, 25  # constants of <linux/mman.h>


def ask_for_huge_pages(memory: torch.Tensor, *, collapse: bool = False) -> bool:
    """Back a tensor's memory with huge pages if the system can; returns whether it agreed.

    Args:
        memory: contiguous, on the CPU. Only complete huge pages inside it are requested.
        collapse: copy memory that is already written into huge pages now.

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
    """The C library's `madvise`; None outside Linux."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
