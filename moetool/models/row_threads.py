"""Compiled functions on the threads of torch's own OpenMP pool.

A second pool would take the cores from the first at every change from one to the other.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def on_pool(work: Any) -> Callable[[np.ndarray, int], None]:
    """A call of a compiled function on so many threads of torch's pool."""
    on_threads = _thread_pool()
    address = work.address
    single = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def call(job: np.ndarray, threads: int) -> None:
        if on_threads is None or threads == 1:
            single(job.ctypes.data)
        else:
            on_threads(address, job.ctypes.data, threads, 0)

    call.work = work  # type: ignore[attr-defined]  # keeps the machine code
    return call


def _thread_pool() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP library that torch computes with.

    None where torch uses another library; the kernel then runs on the calling thread.
    """
    root = Path(torch.__file__).parent
    for path in [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*"), "libgomp.so.1"]:
        try:
            start = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        return start
    return None


def next_task_of() -> Any:
    """numba's `next_task(job)`: the first number of a job, which is one more for the next caller."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def next_task(typing_context: Any, job: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(job), generate

    return next_task
