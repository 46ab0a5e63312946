"""Compiled kernels for products of few rows with stored weights, and for unpacking them.

numba compiles a kernel for each kind of weight (`moetool.kernels.cpu.kinds`) when it is first needed.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu.activations import compiled
from moetool.kernels.cpu.columns import compile_columns
from moetool.kernels.cpu.dots import PLACES, SCALE_BYTES, RowJob, RowShape, dot_of, unpacking_of
from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.inputs import ordered_rows
from moetool.kernels.cpu.kinds import BFLOAT16, BFLOAT16_COLUMNS, VECTOR_BYTES, RowKind
from moetool.kernels.cpu.numbers import run_length
from moetool.kernels.cpu.threads import PoolCall, next_task_of, on_pool

BLOCK_ROWS = 32
"""Least rows of a weight per task of a thread; the rows of a weight are a multiple of it."""
_TASK_BYTES, _TASKS = 2**17, 4
"""Bytes of a task, unless a thread would have fewer tasks: it reads shorter runs at 0.75 of the rate
(`tests/bench/test_row_products.py`)."""
_PREFETCH_BYTES = (0, 2048)
"""Prefetch distances of a kernel, in bytes; prefetching is faster on some CPUs and slower on others."""
_TRIAL_BYTES = 2**26  # larger than most caches
_ONE_IN_FP8 = 0x38
_HEAD = len(PLACES)
_prefetches: dict[str, int] = {}


class RowKernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        prefetch_bytes: the fastest prefetch distance on this CPU. It does not affect results.
    """

    multiply: PoolCall
    unpack: PoolCall | None
    prefetch_bytes: int

    def __call__(self, job: Sequence[int]) -> None:
        self.multiply(job, torch.get_num_threads())


@functools.cache
def find_kernel(kind: RowKind) -> RowKernel | None:
    """Return the compiled kernel; None if numba is missing or does not compile it for this CPU."""
    return compiled("products of few rows", lambda: _checked(kind))


def _checked(kind: RowKind) -> RowKernel:
    multiply = _compile(kind)
    unpack = None if kind in (BFLOAT16, BFLOAT16_COLUMNS) or kind.paired else _compile_unpacking(kind)
    _require_sound(kind, multiply)
    _prefetches[kind.name] = ahead = _fastest_prefetch(kind, multiply)
    return RowKernel(multiply, unpack, ahead)


def chosen_prefetches() -> dict[str, int]:
    """Prefetch distance in bytes of each kernel compiled so far, by its number format."""
    return dict(_prefetches)


def _require_sound(kind: RowKind, call: PoolCall) -> None:
    """Raises: RuntimeError: the kernel's product of ones is wrong."""
    rows, blocks = 7, 2 * kind.unroll
    row_bytes = blocks * kind.block_bytes
    ones = kind.one * (BLOCK_ROWS * row_bytes // len(kind.one))
    weight = torch.frombuffer(bytearray(ones), dtype=torch.uint8).view(BLOCK_ROWS, row_bytes)
    x, output = (
        ordered_rows(torch.ones(rows, blocks * kind.numbers, dtype=torch.bfloat16), kind),
        torch.zeros(rows, BLOCK_ROWS, dtype=torch.float32),
    )
    scale = torch.full((1 + 2 * blocks,), kind.factor, dtype=torch.float32)
    if kind.scales_a_block:
        start = SCALE_BYTES if kind.scale == "float8" else 0
        scale.view(torch.uint8)[start:] = 127 if kind.scale == "exponent" else _ONE_IN_FP8
    pairs = [number for row in range(rows) for number in (row, row)]
    job = [*_trial(kind, weight, x, output, 0), weight.data_ptr(), scale.data_ptr(), 0, rows, *pairs]
    call(job, torch.get_num_threads())
    if not (output == blocks * kind.numbers).all():
        raise RuntimeError("its result is wrong")


def _fastest_prefetch(kind: RowKind, call: PoolCall, rounds: int = 4) -> int:
    """The fastest of `_PREFETCH_BYTES`: least CPU time of one thread, over alternating trials."""
    blocks = 4096 // kind.block_bytes
    row_bytes = blocks * kind.block_bytes
    weight = torch.empty(_TRIAL_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS, row_bytes, dtype=torch.uint8)
    ask_for_huge_pages(weight)
    weight.zero_()
    x, output = (
        ordered_rows(torch.zeros(1, blocks * kind.numbers, dtype=torch.bfloat16), kind),
        torch.empty(1, len(weight), dtype=torch.float32),
    )
    scale = torch.ones(4 * blocks, dtype=torch.float32)
    least = dict.fromkeys(_PREFETCH_BYTES, float("inf"))
    for ahead in _PREFETCH_BYTES * rounds:
        head = _trial(kind, weight, x, output, ahead)
        job = [*head, weight.data_ptr(), scale.data_ptr(), 0, 1, 0, 0]
        began = time.thread_time()
        call(job, 1)
        least[ahead] = min(least[ahead], time.thread_time() - began)
    return min(least, key=least.__getitem__)


def _trial(kind: RowKind, weight: torch.Tensor, x: torch.Tensor, output: torch.Tensor, ahead: int) -> tuple[int, ...]:
    """A call for one weight whose rows share their scales."""
    blocks = weight.shape[1] // kind.block_bytes
    groups = blocks if kind.scales_a_block else 1
    shape = RowShape(
        outputs=len(weight),
        x_bytes=x[0].nbytes,
        row_bytes=weight.shape[1],
        groups=groups,
        vectors=blocks // groups,
        scale_rows=len(weight),
        scale_bytes=0,
    )
    return RowJob(0, x.data_ptr(), output.data_ptr(), narrow=0, ahead=ahead, weights=1) + shape


def _compile(kind: RowKind) -> PoolCall:
    import numba
    from numba import types

    next_task, tasks = next_task_of(), _TASKS * max(2, torch.get_num_threads())
    if kind is BFLOAT16_COLUMNS:
        return compile_columns(_TASK_BYTES, tasks)
    most = kind.rows[0]
    dot_most, dot_2, dot_1 = dot_of(kind, most), dot_of(kind, 2), dot_of(kind, 1)
    outputs_at, row_bytes_at, weights_at = PLACES["outputs"], PLACES["row_bytes"], PLACES["weights"]
    scale_rows_at, scale_bytes_at = PLACES["scale_rows"], PLACES["scale_bytes"]

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        row_bytes, scale_rows, scale_bytes = job[row_bytes_at], job[scale_rows_at], job[scale_bytes_at]
        num_weights = job[weights_at]
        scales = _HEAD + num_weights
        starts = scales + num_weights
        pairs = starts + num_weights + 1
        outputs = job[outputs_at]
        step = min(_TASK_BYTES // row_bytes, num_weights * outputs // tasks)
        step = max(step // BLOCK_ROWS, 1) * BLOCK_ROWS
        blocks = -(-outputs // step)
        task = next_task(job)
        while task < num_weights * blocks:
            which = task // blocks
            first = (task % blocks) * step
            r = job[starts + which]
            end = job[starts + which + 1]
            while r < end:  # the weight's block stays in the CPU cache between passes
                for row in range(first, min(first + step, outputs)):
                    weight = job[_HEAD + which] + row * row_bytes
                    scale = job[scales + which] + row // scale_rows * scale_bytes
                    if r + most <= end:
                        dot_most(weight, scale, job, pairs + 2 * r, row)
                    elif r + 2 <= end:
                        dot_2(weight, scale, job, pairs + 2 * r, row)
                    else:
                        dot_1(weight, scale, job, pairs + 2 * r, row)
                r += most if r + most <= end else 2 if r + 2 <= end else 1
            task = next_task(job)

    return on_pool(work)


def _compile_unpacking(kind: RowKind) -> PoolCall:
    import numba
    from numba import types

    next_task, unpack = next_task_of(), unpacking_of(kind)
    outputs_at, row_bytes_at, output_at = PLACES["outputs"], PLACES["row_bytes"], PLACES["output"]
    scale_rows_at, scale_bytes_at = PLACES["scale_rows"], PLACES["scale_bytes"]
    groups_at, vectors_at = PLACES["groups"], PLACES["vectors"]
    length = run_length(kind)
    run_bytes = kind.row_bytes(length)
    per_vector, each_run = VECTOR_BYTES // run_bytes, kind.scale != "float32"

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        row_bytes, scale_rows, scale_bytes = job[row_bytes_at], job[scale_rows_at], job[scale_bytes_at]
        runs = row_bytes // run_bytes
        groups, per_group = (runs, 1) if each_run else (job[groups_at], job[vectors_at] * per_vector)
        blocks = job[outputs_at] // BLOCK_ROWS
        task = next_task(job)
        while task < blocks:
            for row in range(task * BLOCK_ROWS, (task + 1) * BLOCK_ROWS):
                weight = job[_HEAD] + row * row_bytes
                scale = job[_HEAD + 1] + row // scale_rows * scale_bytes
                output = job[output_at] + row * runs * 2 * length
                for group in range(groups):
                    unpack(weight, scale, group, per_group, output)
            task = next_task(job)

    return on_pool(work)
