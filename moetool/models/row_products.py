"""Products of few rows with bfloat16 weights on a CPU, at the speed of its memory.

A decode step multiplies one row, or a few, with every weight that it reads, so memory bandwidth bounds it. torch's
products of few rows stay far below that bound (`tests/bench/test_row_products.py`). numba compiles the kernel here when
it is first needed. It streams the weights as they are stored, for all experts of a layer in one call, on the threads of
torch's own OpenMP pool: a second pool would take the cores from the first at every change from one to the other.

Each output is one dot product, accumulated in float32 by fused multiply-adds over `_LANES * _CHAINS` interleaved
partial sums that are added pairwise. That order depends on the weight's width alone: not on the processor, the number
of threads, or the rows and experts computed together. So a row has the same result, to the bit, in any batch that the
kernel takes. It differs from torch's product in rounding only.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moetool.models.huge_pages import ask_for_huge_pages

MAX_ROWS = 2
"""Rows of a product up to which the kernel is faster than torch's (`tests/bench/test_row_products.py`): beyond them
arithmetic bounds both, and torch's multiplies bfloat16 in pairs where the processor can."""
MIN_ELEMENTS = 2**18
"""Numbers in a weight below which calling the kernel costs more than it saves, and so compiling it."""
_LANES = 16  # float32 in a vector of AVX-512; two of AVX2
_CHAINS = 4  # accumulators of a row that hide the latency of an addition
_PAIRS = 2 * _LANES  # numbers of a weight in a vector: those at even places and those at odd ones
_BLOCK_ROWS = 32  # rows of a weight that one thread takes at a time
_HEAD = 7  # numbers of a job before its lists
_PREFETCH_BYTES = (0, 2048)
"""How far ahead of itself the kernel may ask for a weight; on some processors that is faster, on others slower."""
_TRIAL_BYTES = 2**26  # more than most caches hold

_log = logging.getLogger(__name__)


class RowsOf(NamedTuple):
    """The rows of x that one weight [O, I] multiplies, and the rows of the output that they make."""

    weight: torch.Tensor
    sources: Sequence[int]
    targets: Sequence[int]


def multiplies(x: torch.Tensor, weight: Any) -> bool:
    """Whether the kernel takes the product of rows x [T, I] with the transpose of a weight [O, I]."""
    return 0 < len(x) <= MAX_ROWS and takes(weight)


def takes(weight: Any) -> bool:
    """Whether the kernel takes products of up to `MAX_ROWS` rows with this weight [O, I]."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= MIN_ELEMENTS
        and weight.shape[1] % (_LANES * _CHAINS) == 0
        and weight.shape[0] % _BLOCK_ROWS == 0
        and weight.is_contiguous()
        and find_kernel() is not None
    )


def products(xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The products x @ weight.T of several weights of one shape, computed in one call.

    Args:
        xs: the rows [T, I] of each weight, at most `MAX_ROWS`, all of one dtype, on the CPU.
        weights: bfloat16 [O, I] that `takes` accepts.

    Returns:
        For each weight [T, O], of the dtype of `xs`.
    """
    counts = [len(x) for x in xs]
    ends = list(accumulate(counts))
    rows = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    x_RI = xs[0] if len(xs) == 1 else torch.cat(list(xs))
    jobs = [RowsOf(weight, each, each) for weight, each in zip(weights, rows, strict=True)]
    return list(scattered_products(x_RI, jobs, ends[-1]).split(counts))


def scattered_products(x_TI: torch.Tensor, jobs: Sequence[RowsOf], num_targets: int) -> torch.Tensor:
    """The products of several weights of one shape with rows of one x, each written to its own row of one output.

    Args:
        x_TI: rows on the CPU.
        jobs: bfloat16 weights [O, I] that `takes` accepts. Together their targets are the rows of the output.
        num_targets: R.

    Returns:
        [R, O], of the dtype of `x_TI`.
    """
    kernel = find_kernel()
    assert kernel is not None, "takes() says whether there is a kernel"
    num_outputs, num_inputs = jobs[0].weight.shape
    wide_TI = torch.empty(len(x_TI), num_inputs // _PAIRS, 2, _LANES)  # as the kernel splits a weight's numbers
    wide_TI.copy_(x_TI.reshape(len(x_TI), -1, _LANES, 2).transpose(2, 3))
    output_RO = torch.empty(num_targets, num_outputs, dtype=torch.float32)
    job = [0, wide_TI.data_ptr(), output_RO.data_ptr(), num_outputs, num_inputs, len(jobs), kernel.prefetch_bytes]
    job += [each.weight.data_ptr() for each in jobs]
    job += accumulate((len(each.sources) for each in jobs), initial=0)
    for each in jobs:
        for source, target in zip(each.sources, each.targets, strict=True):
            job += (source, target)
    kernel(np.array(job, dtype=np.int64))
    return output_RO.to(x_TI.dtype)


class RowLinear(torch.nn.Linear):
    """A linear layer that the kernel computes for few rows, and torch for many.

    `adopt` turns a `torch.nn.Linear` into one in place.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if not 0 < rows <= MAX_ROWS:
            return super().forward(input)
        job = RowsOf(self.weight, range(rows), range(rows))
        output = scattered_products(input.reshape(rows, self.in_features), [job], rows)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def adopt(model: torch.nn.Module) -> int:
    """Have the kernel compute the linear layers of a model that it takes; returns how many.

    Effects: changes the class of those layers to `RowLinear` and moves their weights into huge pages; compiles the
        kernel if there is one such layer.
    """
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear and takes(m.weight)]
    for module in linears:
        module.__class__ = RowLinear
        ask_for_huge_pages(module.weight, collapse=True)
    return len(linears)


class Kernel(NamedTuple):
    """The compiled kernel.

    Attributes:
        call: computes a job.
        prefetch_bytes: how far ahead of itself it is the fastest to ask for a weight on this processor. It changes no
            result.
    """

    call: Callable[[np.ndarray, int], None]
    prefetch_bytes: int

    def __call__(self, job: np.ndarray) -> None:
        self.call(job, torch.get_num_threads())


@functools.cache
def find_kernel() -> Kernel | None:
    """The compiled kernel; None where numba is missing or does not compile it for this processor."""
    try:
        call = _compile()
        return Kernel(call, _fastest_prefetch(call))
    except Exception as error:  # numba raises many kinds; torch computes the same products
        _log.warning("products of few rows stay with torch: numba does not compile the kernel (%s)", error)
        return None


def _fastest_prefetch(call: Callable[[np.ndarray, int], None], rounds: int = 4) -> int:
    """Which of `_PREFETCH_BYTES` is the fastest here: the least processor time of one thread, of some tries in turn."""
    width = 2048
    weight = torch.empty(_TRIAL_BYTES // (2 * width), width, dtype=torch.bfloat16)
    ask_for_huge_pages(weight)
    weight.zero_()
    x, output = torch.zeros(width), torch.empty(len(weight))
    least = dict.fromkeys(_PREFETCH_BYTES, float("inf"))
    for ahead in _PREFETCH_BYTES * rounds:
        job = [0, x.data_ptr(), output.data_ptr(), *weight.shape, 1, ahead, weight.data_ptr(), 0, 1, 0, 0]
        began = time.thread_time()
        call(np.array(job), 1)
        least[ahead] = min(least[ahead], time.thread_time() - began)
    return min(least, key=least.__getitem__)


def _compile() -> Callable[[np.ndarray, int], None]:
    import numba
    from numba import types

    next_task = _next_task()
    dot_2, dot_1 = _dot(2), _dot(1)

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        x, output, num_outputs, num_inputs, num_weights = job[1], job[2], job[3], job[4], job[5]
        starts = _HEAD + num_weights
        pairs = starts + num_weights + 1
        blocks = num_outputs // _BLOCK_ROWS
        task = next_task(job)
        while task < num_weights * blocks:
            which = task // blocks
            first = (task % blocks) * _BLOCK_ROWS
            r = job[starts + which]
            end = job[starts + which + 1]
            while r < end:  # the block of the weight stays in the processor's cache from one pair of rows to the next
                for row in range(first, first + _BLOCK_ROWS):
                    weight = job[_HEAD + which] + row * num_inputs * 2
                    if r + 1 < end:
                        dot_2(weight, job, pairs + 2 * r, x, output + row * 4, num_inputs, num_outputs)
                    else:
                        dot_1(weight, job, pairs + 2 * r, x, output + row * 4, num_inputs, num_outputs)
                r += 2
            task = next_task(job)

    on_threads = _thread_pool()
    address = work.address
    single = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def call(job: np.ndarray, threads: int) -> None:
        if on_threads is None or threads == 1:
            single(job.ctypes.data)
        else:
            on_threads(address, job.ctypes.data, threads, 0)

    call.work = work  # type: ignore[attr-defined]  # keeps the machine code
    x = torch.ones(7, _LANES * _CHAINS)
    weight = torch.ones(_BLOCK_ROWS, _LANES * _CHAINS, dtype=torch.bfloat16)
    output = torch.zeros(7, _BLOCK_ROWS)
    rows = [number for row in range(7) for number in (row, row)]
    call(
        np.array([0, x.data_ptr(), output.data_ptr(), *weight.shape, 1, 0, weight.data_ptr(), 0, 7, *rows]),
        torch.get_num_threads(),
    )
    if not (output == x.shape[1]).all():
        raise RuntimeError("it computes something else")
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


def _next_task() -> Any:
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


def _dot(count: int) -> Any:
    """numba's `dot(weight, job, pair, x, output, num_inputs, num_outputs)`, written in LLVM's vectors.

    It computes the dot products of a row of a weight (bfloat16 at `weight`) with `count` rows of x (float32 at `x`).
    From `job[pair]` on lie the numbers of a row of x and of the row of the output that it makes, for each.
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    int32, int64, float32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
    words, floats = (ir.VectorType(kind, _LANES) for kind in (int32, float32))
    shift, upper = ir.Constant(words, [16] * _LANES), ir.Constant(words, [0xFFFF0000] * _LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, job, pair, x, output, num_inputs, num_outputs = arguments
        fma_type = ir.FunctionType(floats, [floats] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{_LANES}f32")
        four = ir.Constant(int64, 4)
        byte = ir.IntType(8).as_pointer()
        prefetch_type = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, prefetch_type, "llvm.prefetch.p0")

        def ask_for(address: Any) -> None:
            reading, keep, data = (ir.Constant(int32, number) for number in (0, 3, 1))
            builder.call(prefetch, [builder.inttoptr(address, byte), reading, keep, data])

        def load(address: Any, vector: Any, kind: Any) -> Any:
            place = builder.add(address, builder.mul(vector, ir.Constant(int64, 4 * _LANES)))
            value = builder.load(builder.inttoptr(place, kind.as_pointer()))
            value.align = 4
            return value

        def number(offset: int) -> Any:
            return builder.load(builder.gep(job, [builder.add(pair, ir.Constant(int64, offset))]))

        ahead = builder.add(weight, builder.load(builder.gep(job, [ir.Constant(int64, _HEAD - 1)])))

        rows = [builder.add(x, builder.mul(builder.mul(number(2 * row), num_inputs), four)) for row in range(count)]
        sums = [[cgutils.alloca_once(builder, floats) for _ in range(_CHAINS)] for _ in range(count)]
        for place in (place for row in sums for place in row):
            builder.store(ir.Constant(floats, [0.0] * _LANES), place)
        step = ir.Constant(int64, _LANES * _CHAINS)
        with cgutils.for_range(builder, builder.sdiv(num_inputs, step)) as loop:
            for half in range(_CHAINS // 2):
                vector = builder.add(
                    builder.mul(loop.index, ir.Constant(int64, _CHAINS // 2)), ir.Constant(int64, half)
                )
                ask_for(builder.add(ahead, builder.mul(vector, ir.Constant(int64, 4 * _LANES))))
                both = load(weight, vector, words)
                for odd, bits in enumerate((builder.shl(both, shift), builder.and_(both, upper))):
                    widened, chain = builder.bitcast(bits, floats), 2 * half + odd
                    place_of_x = builder.add(builder.mul(vector, ir.Constant(int64, 2)), ir.Constant(int64, odd))
                    for row, places in zip(rows, sums, strict=True):
                        value, place = load(row, place_of_x, floats), places[chain]
                        builder.store(builder.call(multiply_add, [widened, value, builder.load(place)]), place)
        for row, places in enumerate(sums):
            total = _pairwise(builder, [builder.load(place) for place in places])
            offset = builder.mul(builder.mul(number(2 * row + 1), num_outputs), four)
            builder.store(total, builder.inttoptr(builder.add(output, offset), float32.as_pointer()))
        return context.get_dummy_value()

    @intrinsic
    def dot(
        typing_context: Any,
        weight: Any,
        job: Any,
        pair: Any,
        x: Any,
        output: Any,
        num_inputs: Any,
        num_outputs: Any,
    ) -> Any:
        return types.void(types.int64, job, *[types.int64] * 5), generate

    return dot


def _pairwise(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all elements of some vectors of `_LANES`, added pairwise."""
    from llvmlite import ir

    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total, width = vectors[0], _LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(total.type, ir.Undefined)
        places = (
            ir.Constant(ir.VectorType(ir.IntType(32), width), [*range(first, first + width)]) for first in (0, width)
        )
        total = builder.fadd(*(builder.shuffle_vector(total, nothing, mask) for mask in places))
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
