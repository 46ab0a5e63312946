"""LLVM's vectors of float32 and of stored numbers, for functions that numba compiles."""

import functools
import math
import platform
import struct
from typing import Any

LANES = 16  # float32 in a vector of AVX-512; two of AVX2
_POWERS = tuple(math.log(2) ** n / math.factorial(n) for n in range(8))
"""Taylor coefficients of 2**x for x between -0.5 and 0.5."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def _bfloat16() -> Any:
    """LLVM's type of bfloat16, which llvmlite lacks."""
    from llvmlite import ir

    class Bfloat16(ir.Type):
        def _to_string(self) -> str:
            return "bfloat"

    return Bfloat16()


class Vectors:
    """LLVM vectors for the code of one builder."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.ir, self.builder = ir, builder
        self.int8, self.int16, self.int32, self.int64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.float32, self.half = ir.FloatType(), ir.HalfType()
        self.floats, self.words = self.of(self.float32), self.of(self.int32)

    def of(self, kind: Any, count: int = LANES) -> Any:
        """The type of a vector of this length."""
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
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = align

    def shuffled(self, vector: Any, indices: list[int]) -> Any:
        """Elements of a vector by index."""
        mask = self.ir.Constant(self.of(self.int32, len(indices)), indices)
        return self.builder.shuffle_vector(vector, self.ir.Constant(vector.type, self.ir.Undefined), mask)

    def merged(self, first: Any, second: Any, indices: list[int]) -> Any:
        """Elements of two vectors by index; those of the second follow those of the first."""
        mask = self.ir.Constant(self.of(self.int32, len(indices)), indices)
        return self.builder.shuffle_vector(first, second, mask)

    def broadcast(self, value: Any) -> Any:
        """A vector with all elements equal."""
        one = self.ir.Constant(self.of(value.type), self.ir.Undefined)
        return self.shuffled(self.builder.insert_element(one, value, self.ir.Constant(self.int32, 0)), [0] * LANES)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call an LLVM function."""
        from numba.core import cgutils

        return cgutils.get_or_insert_function(self.builder.module, self.ir.FunctionType(result, arguments), name)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        fused = self.function(f"llvm.fma.v{LANES}f32", self.floats, *[self.floats] * 3)
        return self.builder.call(fused, [a, b, c])

    def pair_products(self, a: Any, b: Any, c: Any) -> Any:
        """c + the two products of bfloat16 in each word of a and b, by `avx512_bf16`; subnormal numbers are 0."""
        pairs = self.of(_bfloat16(), 2 * LANES)
        function = self.function("llvm.x86.avx512bf16.dpbf16ps.512", self.floats, self.floats, pairs, pairs)
        return self.builder.call(function, [c, *(self.builder.bitcast(each, pairs) for each in (a, b))])

    def paired(self, words: Any) -> Any:
        """Nibbles 0 of int16 words as bfloat16, in int32; bits 4 of the words and above are ignored."""
        shorts = self.of(self.int16, 2 * LANES)
        table = [0 if n == 0 else struct.unpack("<I", struct.pack("<f", n))[0] >> 16 for n in range(LANES)] * 2
        look_up = self.function("llvm.x86.avx512.permvar.hi.512", shorts, shorts, shorts)
        return self.builder.call(look_up, [self.ir.Constant(shorts, table), words])

    def exponential(self, x: Any) -> Any:
        """exp(x) for vectors of numbers that are at most 0, within about 2 ulp; exp(-87) below -87."""
        builder, least = self.builder, self.all(self.float32, -87.0)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        binary = builder.fmul(x, self.all(self.float32, math.log2(math.e)))
        nearest = self.function(f"llvm.rint.v{LANES}f32", self.floats, self.floats)
        whole = builder.call(nearest, [binary])
        rest = builder.fsub(binary, whole)
        power = self.all(self.float32, _POWERS[-1])
        for factor in reversed(_POWERS[:-1]):
            power = self.multiply_add(power, rest, self.all(self.float32, factor))
        shifted = builder.shl(builder.fptosi(whole, self.words), self.all(self.int32, 23))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, self.words), shifted), self.floats)
        return builder.select(builder.fcmp_unordered("uno", x, x), x, scaled)

    def prefetch(self, address: Any) -> None:
        byte = self.int8.as_pointer()
        prefetch = self.function("llvm.prefetch.p0", self.ir.VoidType(), byte, *[self.int32] * 3)
        reading, keep, data = (self.ir.Constant(self.int32, number) for number in (0, 3, 1))
        self.builder.call(prefetch, [self.builder.inttoptr(address, byte), reading, keep, data])

    def halves(self, words: Any) -> Any:
        """FP8 numbers in the upper bytes of int16 words, as float16 numbers of 2**-8 times their value."""
        count = words.type.count
        shifted = self.builder.ashr(words, self.all(self.int16, 1, count))
        kept = self.builder.and_(shifted, self.all(self.int16, 0xBF80, count))
        return self.builder.bitcast(kept, self.of(self.half, count))

    def e2m1(self, words: Any) -> Any:
        """E2M1 numbers in the lowest four bits of int32 words, as float32."""
        builder, count = self.builder, words.type.count
        if has_features("avx512f"):
            return self.looked_up(words, (*_E2M1, *(-value for value in _E2M1)))
        twice = 0xC8643210 - 2**32  # twice the value, by the lowest three bits
        shifts = builder.shl(builder.and_(words, self.all(self.int32, 7, count)), self.all(self.int32, 2, count))
        values = builder.and_(builder.lshr(self.all(self.int32, twice, count), shifts), self.all(self.int32, 15, count))
        half = builder.fmul(builder.sitofp(values, self.of(self.float32, count)), self.all(self.float32, 0.5, count))
        sign = builder.and_(builder.shl(words, self.all(self.int32, 28, count)), self.all(self.int32, -(2**31), count))
        return builder.bitcast(
            builder.or_(builder.bitcast(half, self.of(self.int32, count)), sign), self.of(self.float32, count)
        )

    def nibbles(self, words: Any) -> Any:
        """Integers in the lowest four bits of int32 words, as float32."""
        if has_features("avx512f"):
            return self.looked_up(words, tuple(map(float, range(LANES))))
        return self.builder.sitofp(self.builder.and_(words, self.all(self.int32, 15)), self.floats)

    def levels(self, words: Any, table: tuple[int, ...]) -> Any:
        """Values of a table of 16 signed bytes by the lowest four bits of int32 words, as float32."""
        if has_features("avx512f"):
            return self.looked_up(words, tuple(map(float, table)))
        builder = self.builder
        fours = [bytes(value & 0xFF for value in table[first : first + 4]) for first in range(0, 16, 4)]
        chosen = [self.all(self.int32, int.from_bytes(four, "little", signed=True)) for four in fours]
        for bit in (4, 8):
            unset = builder.icmp_signed("==", builder.and_(words, self.all(self.int32, bit)), self.all(self.int32, 0))
            chosen = [builder.select(unset, *pair) for pair in zip(chosen[::2], chosen[1::2], strict=True)]
        shifts = builder.shl(builder.and_(words, self.all(self.int32, 3)), self.all(self.int32, 3))
        shifted = builder.shl(builder.lshr(chosen[0], shifts), self.all(self.int32, 24))
        return builder.sitofp(builder.ashr(shifted, self.all(self.int32, 24)), self.floats)

    def looked_up(self, words: Any, table: tuple[float, ...]) -> Any:
        """Table values by the lowest four bits of int32 words; AVX-512 only."""
        look_up = self.function("llvm.x86.avx512.permvar.sf.512", self.floats, self.floats, self.words)
        return self.builder.call(look_up, [self.ir.Constant(self.floats, table), words])

    def rounded(self, number: Any) -> Any:
        """A float32, or a vector of them, rounded to the nearest bfloat16, ties to even, as int16."""
        upper = self.builder.lshr(self._rounded_bits(number), self._each(self._word(number), 16))
        is_vector = isinstance(number.type, self.ir.VectorType)
        return self.builder.trunc(upper, self.of(self.int16) if is_vector else self.int16)

    def rounded_wide(self, number: Any) -> Any:
        """Like `rounded`, as float32."""
        bits = self.builder.and_(self._rounded_bits(number), self._each(self._word(number), -(2**16)))
        return self.builder.bitcast(bits, number.type)

    def _rounded_bits(self, number: Any) -> Any:
        """Bits of a float32 whose upper half is the nearest bfloat16."""
        builder, word = self.builder, self._word(number)
        half, one, last = (self._each(word, value) for value in (16, 1, 0x7FFF))
        bits = builder.bitcast(number, word)
        odd = builder.and_(builder.lshr(bits, half), one)
        return builder.add(builder.add(bits, last), odd)

    def _word(self, number: Any) -> Any:
        return self.of(self.int32) if isinstance(number.type, self.ir.VectorType) else self.int32

    def bfloat16(self, number: Any) -> Any:
        """Like `rounded`; NaN stays NaN."""
        short = self.rounded(number)
        is_nan = self.builder.fcmp_unordered("uno", number, number)
        return self.builder.select(is_nan, self._each(short.type, 0x7FC0), short)

    def converted(self, numbers: Any) -> Any:
        """Like `rounded` for a vector, by `avx512_bf16`; subnormal numbers become 0."""
        made = self.of(_bfloat16())
        convert = self.function("llvm.x86.avx512bf16.cvtneps2bf16.512", made, self.floats)
        return self.builder.bitcast(self.builder.call(convert, [numbers]), self.of(self.int16))

    def widened(self, shorts: Any) -> Any:
        """A vector of bfloat16, as int16, in float32."""
        bits = self.builder.shl(self.builder.zext(shorts, self.words), self.all(self.int32, 16))
        return self.builder.bitcast(bits, self.floats)

    def _each(self, kind: Any, value: Any) -> Any:
        """A constant: a number, or a vector of equal ones."""
        if isinstance(kind, self.ir.VectorType):
            return self.all(kind.element, value, kind.count)
        return self.ir.Constant(kind, value)

    def powers(self, exponents: Any) -> Any:
        """2 to the power of bytes with a bias of 127, as float32; infinity for 255."""
        builder, count = self.builder, exponents.type.count
        wide = builder.zext(exponents, self.of(self.int32, count))
        shifted = builder.shl(wide, self.all(self.int32, 23, count))
        least = builder.icmp_unsigned("==", wide, self.all(self.int32, 0, count))
        bits = builder.select(least, self.all(self.int32, 1 << 22, count), shifted)
        return builder.bitcast(bits, self.of(self.float32, count))


def cpu_has_pairs() -> bool:
    """Whether this process may multiply pairs of bfloat16 by `avx512_bf16`."""
    return has_features("avx512f", "avx512bf16")


@functools.cache
def has_features(*names: str) -> bool:
    """Whether LLVM compiles for features of this x86 CPU."""
    if platform.machine() != "x86_64":
        return False
    try:
        import llvmlite.binding
        import numba
    except ImportError:
        return False
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:  # LLVM ends a process that compiles for a CPU without them
        return False
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name) for name in names)


def pairwise_sum(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all elements of some vectors of `LANES`, added pairwise."""
    from llvmlite import ir

    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total, width = vectors[0], LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(total.type, ir.Undefined)
        halves = (
            ir.Constant(ir.VectorType(ir.IntType(32), width), [*range(first, first + width)]) for first in (0, width)
        )
        total = builder.fadd(*(builder.shuffle_vector(total, nothing, mask) for mask in halves))
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
