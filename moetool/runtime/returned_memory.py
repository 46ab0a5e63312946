"""Return memory to the system while the process runs, on Linux; elsewhere the process keeps it."""

import ctypes
import functools
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

_DONTNEED = 4  # of <linux/mman.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of <malloc.h>
_LARGE, _LARGEST = 2 << 20, 32 << 20  # of blocks that the C library may keep: at least here, at most there
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (?:(r-[x-]p) \S+ \S+ [1-9]\d*\s+/.*\.so[.\d]*$)?").match
"""A line of /proc/self/smaps that begins a mapping; the third group is there for a library's code and constants."""
_KEPT_PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def release_pages(memory: torch.Tensor) -> None:
    """Return the whole pages inside a tensor on the CPU; they hold zeros when they are next touched."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if memory.device.type == "cpu" and length > 0 and (library := _library()) is not None:
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DONTNEED)


def return_freed_memory(kept_bytes: int = 0) -> None:
    """Have the C library return freed memory, all but about `kept_bytes` where the heap ends, from now on.

    By default each thread's heap keeps freed activations of up to 32 MB, which a limit on resident memory does not
    allow. Where nothing is kept, each forward touches new pages: a fifth of the processor time of a prompt. So threads
    that start later share one heap, with freed blocks of up to 32 MB below the blocks in use; it grows to the peak of
    all activations at once. For the same reason oneDNN caches 128 compiled products instead of 1,024, of 1.4 to 2.1 MB
    each. This has no effect if oneDNN has computed a product already, or if the environment sets another number.

    Args:
        kept_bytes: memory set aside for the activations of a forward.
    """
    os.environ.setdefault(_KEPT_PRODUCTS, "128")
    library = _library()
    if library is not None and hasattr(library, "mallopt"):
        kept = max(_LARGE, kept_bytes)
        library.mallopt(_ARENA_MAX, 1)
        library.mallopt(_MMAP_THRESHOLD, min(kept, _LARGEST))
        library.mallopt(_TRIM_THRESHOLD, min(kept, 2**31 - 1))


def trim_heap() -> None:
    """Return freed memory that the C library keeps."""
    if (library := _library()) is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def release_code() -> None:
    """Return the pages of libraries' code and constants, which the system reads again from its files when next used.

    Imports and compilers use most of them once: 214 of the 643 MB of a server of the reference model.
    """
    if (library := _library()) is None:
        return
    for code in unchanged_mappings(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        library.madvise(ctypes.c_void_p(code.start), ctypes.c_size_t(len(code)), _DONTNEED)


def unchanged_mappings(smaps: str) -> list[range]:
    """Addresses of libraries' code and constants that equal their files, by the text of /proc/self/smaps.

    The loader writes addresses into constants of some libraries. Such a page is anonymous, in memory or swapped out,
    and cannot be read again from the file.
    """
    found: list[range] = []
    changed = True
    for line in smaps.splitlines():
        if (match := _MAPPING(line)) is not None:
            changed = match[3] is None
            if not changed:
                found.append(range(int(match[1], 16), int(match[2], 16)))
        elif not changed and line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0":
            changed = True
            found.pop()
    return found


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
