"""Numbers at addresses, for functions that numba compiles. numba is imported with this module."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moetool.kernels.cpu.vectors import LANES, Vectors, pairwise_sum

FLOAT32, BFLOAT16, INT64, BOOLEAN = range(4)
"""Types of numbers in memory."""


def _pointer(kind: Any) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats = _pointer(types.float32)
shorts = _pointer(types.uint16)
longs = _pointer(types.int64)
octets = _pointer(types.uint8)


@intrinsic
def widened(typing_context: Any, bits: Any) -> Any:
    """The bfloat16 of these bits, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def rounded(typing_context: Any, number: Any) -> Any:
    """The bits of a float32, rounded to the nearest bfloat16, ties to even; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Vectors(builder).bfloat16(arguments[0])

    return types.uint16(types.float32), generate


@intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        function = ir.FunctionType(kind, [kind] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.fma.f32"), arguments)

    return types.float32(*[types.float32] * 3), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 to an int32 from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def dot_float32(typing_context: Any, x: Any, weight: Any, vectors: Any) -> Any:
    """The dot product of two rows of float32, of whole vectors."""
    return _dot(False)


@intrinsic
def dot_bfloat16(typing_context: Any, x: Any, weight: Any, vectors: Any) -> Any:
    """The dot product of a row of float32 with one of bfloat16, of whole vectors."""
    return _dot(True)


def _dot(narrow: bool) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, count = arguments
        v = Vectors(builder)
        total = cgutils.alloca_once(builder, v.floats)
        builder.store(v.all(v.float32, 0.0), total)
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(weight, v.times(loop.index, (2 if narrow else 4) * LANES))
            numbers = v.widened(v.load(place, v.of(v.int16), 2)) if narrow else v.load(place, v.floats)
            other = v.load(builder.add(x, v.times(loop.index, 4 * LANES)), v.floats)
            builder.store(v.multiply_add(numbers, other, builder.load(total)), total)
        return pairwise_sum(builder, [builder.load(total)])

    return types.float32(*[types.int64] * 3), generate


@intrinsic
def called(typing_context: Any, function: Any, job: Any) -> Any:
    """Call the compiled function at an address with its job."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [long]).as_pointer())
        builder.call(function, [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def called_on_threads(typing_context: Any, start: Any, function: Any, job: Any, threads: Any) -> Any:
    """Call the function on threads, by the `GOMP_parallel` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long, word = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [long, long, word, word])
        start = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(start, [*arguments[1:3], builder.trunc(arguments[3], word), ir.Constant(word, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def ordered_by(typing_context: Any, function: Any, x: Any, ordered: Any, blocks: Any) -> Any:
    """Call a function of `moetool.kernels.cpu.inputs` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
