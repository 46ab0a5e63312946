"""Compiled functions on the threads of torch's own OpenMP pool.

A second pool would compete with the first for the cores at every switch.
"""

import contextlib
import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

PoolCall = Callable[[Sequence[int], int], None]
"""Runs a job, given by its numbers, on this many threads."""


def on_pool(work: Any) -> PoolCall:
    """Return a call that runs a compiled function on threads of torch's pool."""
    on_threads = thread_pool()
    address = work.address
    single = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def call(job: Sequence[int], threads: int) -> None:
        numbers = array("q", job)
        at, _ = numbers.buffer_info()
        if on_threads is None or threads == 1:
            single(at)
        else:
            on_threads(address, at, threads, 0)

    call.work = work  # type: ignore[attr-defined]  # keeps the machine code alive
    return call


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_pool() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP library that torch computes with.

    None if torch uses another library; the kernel then runs on the calling thread.
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


def next_task_of(index: int = 0) -> Any:
    """numba's `next_task(job)`: fetch the number at an index of a job, and add one to it atomically."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def next_task(typing_context: Any, job: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = builder.gep(arguments[0], [ir.Constant(ir.IntType(64), index)])
            return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

        return types.int64(job), generate

    return next_task
