"""Compiled kernels for products of few rows with weights as they are stored, and for unpacking them.

numba compiles a kernel for each kind of weight when it is first needed. It runs on the threads of torch's own OpenMP
pool: a second pool would take the cores from the first at every change from one to the other.

Each output is one dot product, accumulated in float32 by fused multiply-adds over interleaved partial sums that are
added pairwise. That order depends on the kind of weight and its width alone: not on the processor, the number of
threads, or the rows and weights computed together. So a row has the same result, to the bit, in any batch.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moetool.models.huge_pages import ask_for_huge_pages

BLOCK_ROWS = 32
"""Rows of a weight that one thread takes at a time."""
LANES = 16  # float32 in a vector of AVX-512; two of AVX2
VECTOR_BYTES = 4 * LANES
_RUN = 32  # numbers that are unpacked at a time
_PREFETCH_BYTES = (0, 2048)
"""Prefetch distances of a kernel, in bytes; prefetching is faster on some processors and slower on others."""
_TRIAL_BYTES = 2**26  # more than most caches hold
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of weight.

    Attributes:
        name: of the numbers.
        numbers: in a vector of 64 bytes.
        ways: numbers of a word of the vector.
        chains: accumulators of a row that hide the latency of an addition.
        unroll: vectors at a time.
        rows: of x that one pass over a row of the weight multiplies, the most first.
        scale: `none`; `float32`, for blocks of rows and columns; `exponent`, a byte for each 32 numbers of a row.
        factor: of its scales of float32, for the way in which the kernel reads its numbers.
    """

    name: str
    numbers: int
    ways: int
    chains: int
    unroll: int
    rows: tuple[int, ...]
    scale: str
    factor: float = 1.0

    @property
    def words(self) -> int:
        """Words in a vector."""
        return self.numbers // self.ways


BFLOAT16 = RowKind("bfloat16", numbers=32, ways=2, chains=4, unroll=2, rows=(2, 1), scale="none")
FP8 = RowKind("fp8", numbers=64, ways=2, chains=2, unroll=1, rows=(4, 2, 1), scale="float32", factor=2.0**8)
INT8 = RowKind("int8", numbers=64, ways=4, chains=2, unroll=1, rows=(4, 2, 1), scale="float32")
MXFP4 = RowKind("mxfp4", numbers=128, ways=8, chains=2, unroll=1, rows=(4, 2, 1), scale="exponent")


class RowJob(NamedTuple):
    """The numbers of a call of a kernel, in this order, before its lists.

    The lists: for each weight the address of its numbers and of its scales, and the first of its pairs, with the end
    of the last one's; then for each pair the row of x and the row of the output that it makes.

    Attributes:
        next_task: 0; counted up by the threads.
        x: address, float32 [T, V, W, K]: V vectors of W ways of K words.
        output: address, float32 [R, O]; of unpacked weights bfloat16 [O, I].
        outputs: O.
        x_bytes: of a row of x.
        row_bytes: of a row of a weight.
        groups: of columns that have a scale each, or 1.
        vectors: in such a group.
        scale_rows: rows of the weight that share a row of scales.
        scale_bytes: of a row of scales.
        ahead: bytes.
        weights: their number.
    """

    next_task: int
    x: int
    output: int
    outputs: int
    x_bytes: int
    row_bytes: int
    groups: int
    vectors: int
    scale_rows: int
    scale_bytes: int
    ahead: int
    weights: int


_HEAD = len(RowJob._fields)
_AT = {name: place for place, name in enumerate(RowJob._fields)}


class RowKernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        prefetch_bytes: how far ahead of itself it is the fastest to ask for a weight on this processor. It changes no
            result.
    """

    multiply: Callable[[np.ndarray, int], None]
    unpack: Callable[[np.ndarray, int], None] | None
    prefetch_bytes: int

    def __call__(self, job: np.ndarray) -> None:
        self.multiply(job, torch.get_num_threads())


@functools.cache
def find_kernel(kind: RowKind = BFLOAT16) -> RowKernel | None:
    """The compiled kernel; None where numba is missing or does not compile it for this processor."""
    try:
        multiply = _compile(kind)
        unpack = None if kind is BFLOAT16 else _compile_unpacking(kind)
        _require_sound(kind, multiply)
        return RowKernel(multiply, unpack, _fastest_prefetch(kind, multiply))
    except Exception as error:  # numba raises many kinds; torch computes the same products
        _log.warning("products of few rows stay with torch: numba does not compile the kernel (%s)", error)
        return None


def _require_sound(kind: RowKind, call: Callable[[np.ndarray, int], None]) -> None:
    """Raises: RuntimeError where the kernel multiplies ones otherwise than it should."""
    rows, vectors = 7, 2 * kind.unroll
    one = {"bfloat16": 0x80, "fp8": 0x38, "int8": 1, "mxfp4": 0x22}[kind.name]
    weight = torch.full((BLOCK_ROWS, vectors * VECTOR_BYTES), one, dtype=torch.uint8)
    if kind is BFLOAT16:
        weight = torch.ones(BLOCK_ROWS, vectors * kind.numbers, dtype=torch.bfloat16)
    x, output = torch.ones(rows, vectors * kind.numbers), torch.zeros(rows, BLOCK_ROWS)
    scale = torch.full((vectors,), kind.factor)
    if kind.scale == "exponent":
        scale = torch.full((4 * vectors,), 127, dtype=torch.uint8)
    groups = vectors if kind.scale == "exponent" else 1
    head = RowJob(
        next_task=0,
        x=x.data_ptr(),
        output=output.data_ptr(),
        outputs=BLOCK_ROWS,
        x_bytes=x[0].nbytes,
        row_bytes=vectors * VECTOR_BYTES,
        groups=groups,
        vectors=vectors // groups,
        scale_rows=BLOCK_ROWS,
        scale_bytes=0,
        ahead=0,
        weights=1,
    )
    pairs = [number for row in range(rows) for number in (row, row)]
    call(np.array([*head, weight.data_ptr(), scale.data_ptr(), 0, rows, *pairs]), torch.get_num_threads())
    if not (output == x.shape[1]).all():
        raise RuntimeError("it computes something else")


def _fastest_prefetch(kind: RowKind, call: Callable[[np.ndarray, int], None], rounds: int = 4) -> int:
    """Which of `_PREFETCH_BYTES` is the fastest here: the least processor time of one thread, of some tries in turn."""
    row_bytes = 4096
    weight = torch.empty(_TRIAL_BYTES // row_bytes, row_bytes, dtype=torch.uint8)
    ask_for_huge_pages(weight)
    weight.zero_()
    vectors = row_bytes // VECTOR_BYTES
    x, output = torch.zeros(vectors * kind.numbers), torch.empty(len(weight))
    scale = torch.zeros(4 * vectors)
    groups = vectors if kind.scale == "exponent" else 1
    least = dict.fromkeys(_PREFETCH_BYTES, float("inf"))
    for ahead in _PREFETCH_BYTES * rounds:
        head = RowJob(
            next_task=0,
            x=x.data_ptr(),
            output=output.data_ptr(),
            outputs=len(weight),
            x_bytes=x.nbytes,
            row_bytes=row_bytes,
            groups=groups,
            vectors=vectors // groups,
            scale_rows=len(weight),
            scale_bytes=0,
            ahead=ahead,
            weights=1,
        )
        job = np.array([*head, weight.data_ptr(), scale.data_ptr(), 0, 1, 0, 0])
        began = time.thread_time()
        call(job, 1)
        least[ahead] = min(least[ahead], time.thread_time() - began)
    return min(least, key=least.__getitem__)


def _compile(kind: RowKind) -> Callable[[np.ndarray, int], None]:
    import numba
    from numba import types

    next_task = _next_task()
    most = kind.rows[0]
    dot_most, dot_2, dot_1 = _dot(kind, most), _dot(kind, 2), _dot(kind, 1)
    outputs_at, row_bytes_at, weights_at = _AT["outputs"], _AT["row_bytes"], _AT["weights"]
    scale_rows_at, scale_bytes_at = _AT["scale_rows"], _AT["scale_bytes"]

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        row_bytes, scale_rows, scale_bytes = job[row_bytes_at], job[scale_rows_at], job[scale_bytes_at]
        num_weights = job[weights_at]
        scales = _HEAD + num_weights
        starts = scales + num_weights
        pairs = starts + num_weights + 1
        blocks = job[outputs_at] // BLOCK_ROWS
        task = next_task(job)
        while task < num_weights * blocks:
            which = task // blocks
            first = (task % blocks) * BLOCK_ROWS
            r = job[starts + which]
            end = job[starts + which + 1]
            while r < end:  # the block of the weight stays in the processor's cache from one pass to the next
                for row in range(first, first + BLOCK_ROWS):
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

    return _on_pool(work)


def _compile_unpacking(kind: RowKind) -> Callable[[np.ndarray, int], None]:
    import numba
    from numba import types

    next_task, unpack = _next_task(), _unpacked(kind)
    outputs_at, row_bytes_at, output_at = _AT["outputs"], _AT["row_bytes"], _AT["output"]
    scale_rows_at, scale_bytes_at = _AT["scale_rows"], _AT["scale_bytes"]
    groups_at, vectors_at = _AT["groups"], _AT["vectors"]
    exponents, run_bytes = kind.scale == "exponent", _RUN * VECTOR_BYTES // kind.numbers

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        row_bytes, scale_rows, scale_bytes = job[row_bytes_at], job[scale_rows_at], job[scale_bytes_at]
        runs = row_bytes // run_bytes
        groups, per_group = (runs, 1) if exponents else (job[groups_at], job[vectors_at] * 2)
        blocks = job[outputs_at] // BLOCK_ROWS
        task = next_task(job)
        while task < blocks:
            for row in range(task * BLOCK_ROWS, (task + 1) * BLOCK_ROWS):
                weight = job[_HEAD] + row * row_bytes
                scale = job[_HEAD + 1] + row // scale_rows * scale_bytes
                output = job[output_at] + row * runs * 2 * _RUN
                for group in range(groups):
                    unpack(weight, scale, group, per_group, output)
            task = next_task(job)

    return _on_pool(work)


def _on_pool(work: Any) -> Callable[[np.ndarray, int], None]:
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


class _Vectors:
    """LLVM's vectors, for code that one builder takes."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.ir, self.builder = ir, builder
        self.int8, self.int16, self.int32, self.int64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.float32, self.half = ir.FloatType(), ir.HalfType()
        self.floats = self.of(self.float32)

    def of(self, kind: Any, count: int = LANES) -> Any:
        """The type of so many numbers."""
        return self.ir.VectorType(kind, count)

    def all(self, kind: Any, value: Any, count: int = LANES) -> Any:
        """A constant vector of one value."""
        return self.ir.Constant(self.of(kind, count), [value] * count)

    def number(self, value: int) -> Any:
        """A constant int64."""
        return self.ir.Constant(self.int64, value)

    def times(self, value: Any, factor: int) -> Any:
        """An int64 times a constant."""
        return self.builder.mul(value, self.number(factor))

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        """The value at an address."""
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Write to an address."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = align

    def chosen(self, vector: Any, places: list[int]) -> Any:
        """Elements of a vector by place."""
        mask = self.ir.Constant(self.of(self.int32, len(places)), places)
        return self.builder.shuffle_vector(vector, self.ir.Constant(vector.type, self.ir.Undefined), mask)

    def broadcast(self, value: Any) -> Any:
        """A vector of one value."""
        one = self.ir.Constant(self.of(value.type), self.ir.Undefined)
        return self.chosen(self.builder.insert_element(one, value, self.ir.Constant(self.int32, 0)), [0] * LANES)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of LLVM's."""
        from numba.core import cgutils

        return cgutils.get_or_insert_function(self.builder.module, self.ir.FunctionType(result, arguments), name)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        fused = self.function(f"llvm.fma.v{LANES}f32", self.floats, *[self.floats] * 3)
        return self.builder.call(fused, [a, b, c])

    def ask_for(self, address: Any) -> None:
        """Have the processor read what lies there."""
        byte = self.int8.as_pointer()
        prefetch = self.function("llvm.prefetch.p0", self.ir.VoidType(), byte, *[self.int32] * 3)
        reading, keep, data = (self.ir.Constant(self.int32, number) for number in (0, 3, 1))
        self.builder.call(prefetch, [self.builder.inttoptr(address, byte), reading, keep, data])

    def halves(self, words: Any) -> Any:
        """FP8 numbers in the upper bytes of int16 words as float16 of 2**-8 of their value."""
        count = words.type.count
        moved = self.builder.ashr(words, self.all(self.int16, 1, count))
        kept = self.builder.and_(moved, self.all(self.int16, 0xBF80, count))
        return self.builder.bitcast(kept, self.of(self.half, count))

    def e2m1(self, words: Any) -> Any:
        """The numbers in the lowest four bits of int32 words, as float32."""
        builder, count = self.builder, words.type.count
        if has_avx512():  # which looks up by the lowest four bits
            table = self.ir.Constant(self.floats, [*_E2M1, *(-value for value in _E2M1)])
            look_up = self.function("llvm.x86.avx512.permvar.sf.512", self.floats, self.floats, self.of(self.int32))
            return builder.call(look_up, [table, words])
        twice = 0xC8643210 - 2**32  # of the value, by the lowest three bits
        places = builder.shl(builder.and_(words, self.all(self.int32, 7, count)), self.all(self.int32, 2, count))
        values = builder.and_(builder.lshr(self.all(self.int32, twice, count), places), self.all(self.int32, 15, count))
        half = builder.fmul(builder.sitofp(values, self.of(self.float32, count)), self.all(self.float32, 0.5, count))
        sign = builder.and_(builder.shl(words, self.all(self.int32, 28, count)), self.all(self.int32, -(2**31), count))
        return builder.bitcast(
            builder.or_(builder.bitcast(half, self.of(self.int32, count)), sign), self.of(self.float32, count)
        )

    def powers(self, exponents: Any) -> Any:
        """2 to the power of bytes with a bias of 127, as float32; infinity for 255."""
        builder, count = self.builder, exponents.type.count
        wide = builder.zext(exponents, self.of(self.int32, count))
        moved = builder.shl(wide, self.all(self.int32, 23, count))
        least = builder.icmp_unsigned("==", wide, self.all(self.int32, 0, count))
        bits = builder.select(least, self.all(self.int32, 1 << 22, count), moved)
        return builder.bitcast(bits, self.of(self.float32, count))


@functools.cache
def has_avx512() -> bool:
    """Whether this processor looks up numbers in vectors by vectors of places."""
    import llvmlite.binding

    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


def _planes(vectors: _Vectors, kind: RowKind, address: Any) -> list[Any]:
    """The numbers of 64 bytes as vectors of float32: the words' first ones, then their second ones and so on."""
    builder = vectors.builder
    if kind is FP8:
        words = vectors.load(address, vectors.of(vectors.int16, 2 * LANES))
        planes = []
        for moved in (builder.shl(words, vectors.all(vectors.int16, 8, 2 * LANES)), words):
            halves = vectors.halves(moved)
            for first in (0, LANES):
                part = vectors.chosen(halves, [*range(first, first + LANES)])
                planes.append(builder.fpext(part, vectors.floats))
        return planes
    words = vectors.load(address, vectors.of(vectors.int32))
    if kind is BFLOAT16:
        low = builder.shl(words, vectors.all(vectors.int32, 16))
        high = builder.and_(words, vectors.all(vectors.int32, 0xFFFF0000 - 2**32))
        return [builder.bitcast(bits, vectors.floats) for bits in (low, high)]
    if kind is INT8:
        moved = [builder.shl(words, vectors.all(vectors.int32, 24 - 8 * byte)) for byte in range(4)]
        numbers = [builder.ashr(each, vectors.all(vectors.int32, 24)) for each in moved]
        return [builder.sitofp(each, vectors.floats) for each in numbers]
    return [vectors.e2m1(builder.lshr(words, vectors.all(vectors.int32, 4 * place))) for place in range(8)]


def _dot(kind: RowKind, count: int) -> Any:
    """numba's `dot(weight, scale, job, pair, row)`, written in LLVM's vectors.

    It computes the dot products of a row of a weight with `count` rows of x. From `job[pair]` on lie the numbers of a
    row of x and of the row of the output that it makes, for each.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, scale, job, pair, row = arguments
        vectors = _Vectors(builder)

        def number(place: Any) -> Any:
            return builder.load(builder.gep(job, [place]))

        def field(name: str) -> Any:
            return number(vectors.number(_AT[name]))

        def places(chains: int) -> list[list[Any]]:
            return [[cgutils.alloca_once(builder, vectors.floats) for _ in range(chains)] for _ in range(count)]

        def clear(sums: list[list[Any]]) -> None:
            for place in (place for each in sums for place in each):
                builder.store(vectors.all(vectors.float32, 0.0), place)

        def add(first: Any, sums: list[list[Any]]) -> None:
            """The products of `unroll` vectors from the `first` on."""
            chain = 0
            for step in range(kind.unroll):
                vector = builder.add(first, vectors.number(step))
                offset = vectors.times(vector, VECTOR_BYTES)
                vectors.ask_for(builder.add(builder.add(weight, field("ahead")), offset))
                x_offset = vectors.times(vector, 4 * kind.numbers)
                for plane in _planes(vectors, kind, builder.add(weight, offset)):
                    for x, chains in zip(rows, sums, strict=True):
                        value = vectors.load(builder.add(x, x_offset), vectors.floats)
                        place = chains[chain % kind.chains]
                        builder.store(vectors.multiply_add(plane, value, builder.load(place)), place)
                    x_offset = builder.add(x_offset, vectors.number(VECTOR_BYTES))
                    chain += 1

        rows = []
        for each in range(count):
            source = number(builder.add(pair, vectors.number(2 * each)))
            rows.append(builder.add(field("x"), builder.mul(source, field("x_bytes"))))
        totals = places(kind.chains)
        clear(totals)
        if kind.scale == "none":
            steps = builder.sdiv(field("vectors"), vectors.number(kind.unroll))
            with cgutils.for_range(builder, steps) as loop:
                add(vectors.times(loop.index, kind.unroll), totals)
        else:
            sums = places(kind.chains)
            with cgutils.for_range(builder, field("groups")) as group:
                clear(sums)
                if kind.scale == "exponent":
                    add(group.index, sums)
                    four = vectors.load(
                        builder.add(scale, vectors.times(group.index, 4)), vectors.of(vectors.int8, 4), 1
                    )
                    factor = vectors.chosen(vectors.powers(four), [lane // 4 for lane in range(LANES)])
                else:
                    begin = builder.mul(group.index, field("vectors"))
                    with cgutils.for_range(builder, field("vectors")) as loop:
                        add(builder.add(begin, loop.index), sums)
                    at = builder.add(scale, vectors.times(group.index, 4))
                    factor = vectors.broadcast(vectors.load(at, vectors.float32))
                for chains, whole in zip(sums, totals, strict=True):
                    for place, total in zip(chains, whole, strict=True):
                        made = vectors.multiply_add(factor, builder.load(place), builder.load(total))
                        builder.store(made, total)
        for each, chains in enumerate(totals):
            made = _pairwise(builder, [builder.load(place) for place in chains])
            target = number(builder.add(pair, vectors.number(2 * each + 1)))
            at = builder.add(builder.mul(target, field("outputs")), row)
            vectors.store(made, builder.add(field("output"), vectors.times(at, 4)))
        return context.get_dummy_value()

    @intrinsic
    def dot(typing_context: Any, weight: Any, scale: Any, job: Any, pair: Any, row: Any) -> Any:
        return types.void(types.int64, types.int64, job, types.int64, types.int64), generate

    return dot


def _unpacked(kind: RowKind) -> Any:
    """numba's `unpack(weight, scale, group, runs, output)`: a group of a row times its scale, as bfloat16."""
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    run_bytes = _RUN * VECTOR_BYTES // kind.numbers

    def numbers_of(vectors: _Vectors, address: Any) -> list[Any]:
        """A run of numbers, in order."""
        builder = vectors.builder
        stored = vectors.load(address, vectors.of(vectors.int8, run_bytes), 1)
        if kind is MXFP4:
            made = []
            for first in range(0, _RUN, LANES):
                wide = builder.zext(
                    vectors.chosen(stored, [(first + lane) // 2 for lane in range(LANES)]), _words(vectors)
                )
                halves = vectors.ir.Constant(_words(vectors), [lane % 2 * 4 for lane in range(LANES)])
                made.append(vectors.e2m1(builder.lshr(wide, halves)))
            return made
        parts = [vectors.chosen(stored, [*range(first, first + LANES)]) for first in range(0, _RUN, LANES)]
        if kind is INT8:
            return [builder.sitofp(builder.sext(part, _words(vectors)), vectors.floats) for part in parts]
        wide = [builder.zext(part, vectors.of(vectors.int16)) for part in parts]
        moved = [builder.shl(part, vectors.all(vectors.int16, 8)) for part in wide]
        return [builder.fpext(vectors.halves(part), vectors.floats) for part in moved]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, scale, group, runs, output = arguments
        vectors = _Vectors(builder)
        if kind is MXFP4:
            factor = vectors.powers(vectors.load(builder.add(scale, group), vectors.of(vectors.int8, 1), 1))
            factor = vectors.chosen(factor, [0] * LANES)
        else:
            factor = vectors.broadcast(vectors.load(builder.add(scale, vectors.times(group, 4)), vectors.float32))
        with cgutils.for_range(builder, runs) as loop:
            run = builder.add(builder.mul(group, runs), loop.index)
            target = builder.add(output, vectors.times(run, 2 * _RUN))
            for numbers in numbers_of(vectors, builder.add(weight, vectors.times(run, run_bytes))):
                bits = builder.bitcast(builder.fmul(numbers, factor), _words(vectors))
                odd = builder.and_(builder.lshr(bits, vectors.all(vectors.int32, 16)), vectors.all(vectors.int32, 1))
                nearest = builder.add(builder.add(bits, vectors.all(vectors.int32, 0x7FFF)), odd)  # ties to even
                upper = builder.lshr(nearest, vectors.all(vectors.int32, 16))
                vectors.store(builder.trunc(upper, vectors.of(vectors.int16)), target, 2)
                target = builder.add(target, vectors.number(2 * LANES))
        return context.get_dummy_value()

    @intrinsic
    def unpack(typing_context: Any, weight: Any, scale: Any, group: Any, runs: Any, output: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return unpack


def _words(vectors: _Vectors) -> Any:
    return vectors.of(vectors.int32)


def _pairwise(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all elements of some vectors of `LANES`, added pairwise."""
    from llvmlite import ir

    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total, width = vectors[0], LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(total.type, ir.Undefined)
        places = (
            ir.Constant(ir.VectorType(ir.IntType(32), width), [*range(first, first + width)]) for first in (0, width)
        )
        total = builder.fadd(*(builder.shuffle_vector(total, nothing, mask) for mask in places))
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
