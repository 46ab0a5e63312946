"""Numbers in ggml's blocks as vectors of float32, in their order in the weight.

They are bit-identical to those of the gguf package. A product of a number and its scales has at most 24 bits, so it is
exact, and only adding or subtracting a minimum rounds.
"""

from collections.abc import Callable, Sequence
from typing import Any

from moetool.kernels.cpu.ggml_codebooks import CODED
from moetool.kernels.cpu.ggml_reader import BlockReader
from moetool.kernels.cpu.vectors import LANES, Vectors

_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = 2, 3, 6, 7, 8
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = 10, 11, 12, 13, 14
_IQ4_NL, _IQ4_XS, _MXFP4 = 20, 23, 39
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of IQ4 by their four bits (ggml's `kvalues_iq4nl`)."""


def block_numbers(vectors: Vectors, kind: int, address: Any) -> list[Any]:
    """Numbers of a block, `LANES` per vector.

    Args:
        kind: ggml's type.
    """
    block = BlockReader(vectors, address)
    if kind not in CODED:
        return _READ[kind](block)
    return [vectors.builder.fmul(plane, group.scale) for group in CODED[kind](block) for plane in group.planes]


def _q4_0(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    numbers = [block.floats(block.masked(block.nibbles(2, upper), 15), less=8) for upper in (0, 1)]
    return [block.builder.fmul(each, scale) for each in numbers]


def _q4_1(block: BlockReader) -> list[Any]:
    scale, least = (block.vectors.broadcast(block.scale(offset)) for offset in (0, 2))
    numbers = [block.vectors.nibbles(block.nibbles(4, upper)) for upper in (0, 1)]
    return [block.vectors.multiply_add(each, scale, least) for each in numbers]


def _q5_0(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    return [block.builder.fmul(block.floats(each, less=16), scale) for each in _five_bits(block, 2)]


def _q5_1(block: BlockReader) -> list[Any]:
    scale, least = (block.vectors.broadcast(block.scale(offset)) for offset in (0, 2))
    return [block.vectors.multiply_add(block.floats(each), scale, least) for each in _five_bits(block, 4)]


def _five_bits(block: BlockReader, offset: int) -> list[Any]:
    """32 numbers as int32: four bytes hold their fifth bits, and the next 16 their lower bits."""
    vectors, builder = block.vectors, block.builder
    made = []
    for upper in (0, 1):
        fifths = vectors.load(block.at(offset + 2 * upper), vectors.int16, 1)
        fifth = block.masked(block.spread(fifths, range(LANES)), 1)
        low = block.masked(block.nibbles(offset + 4, upper), 15)
        made.append(builder.or_(low, builder.shl(fifth, vectors.all(vectors.int32, 4))))
    return made


def _q8_0(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    return [block.builder.fmul(block.signed(2 + first), scale) for first in (0, LANES)]


def _q2_k(block: BlockReader) -> list[Any]:
    vectors, builder = block.vectors, block.builder
    both = block.bytes(0)
    scales, least = (vectors.broadcast(block.scale(offset)) for offset in (80, 82))
    scales = builder.fmul(block.floats(block.masked(both, 15)), scales)
    minima = builder.fmul(block.floats(block.masked(both, 15, shift=-4)), builder.fneg(least))
    made = []
    for index, half, part, first in _SIXTEENTHS:
        number = block.floats(block.masked(block.bytes(16 + 32 * half + first), 3, shift=-2 * part))
        scale, least = (vectors.shuffled(each, [index] * LANES) for each in (scales, minima))
        made.append(vectors.multiply_add(number, scale, least))
    return made


def _q3_k(block: BlockReader) -> list[Any]:
    """Subtract four from each number whose third bit is not set."""
    vectors, builder = block.vectors, block.builder
    first, second, upper = block.words(96, 3)
    words = []
    for index, (word, shift) in enumerate(((first, 0), (second, 0), (first, 4), (second, 4))):
        high = builder.shl(_bits(block, upper, 0x03030303, 2 * index), vectors.ir.Constant(vectors.int32, 4))
        words.append(builder.or_(_bits(block, word, 0x0F0F0F0F, shift), high))
    scales = builder.fmul(block.floats(_bytes_of(block, words), less=32), vectors.broadcast(block.scale(108)))
    made = []
    for index, half, part, first in _SIXTEENTHS:
        low = block.masked(block.bytes(32 + 32 * half + first), 3, shift=-2 * part)
        third = block.masked(block.bytes(first), 4, shift=2 - 4 * half - part)
        number = block.floats(builder.or_(low, third), less=4)
        made.append(builder.fmul(number, vectors.shuffled(scales, [index] * LANES)))
    return made


def _q4_k(block: BlockReader) -> list[Any]:
    scales, made = six_bits(block), []
    for part in range(8):
        for first in (0, LANES):
            number = block.vectors.nibbles(block.nibbles(16 + part // 2 * 32 + first, part % 2))
            made.append(_scaled(block, number, scales, part))
    return made


def _q5_k(block: BlockReader) -> list[Any]:
    scales, made = six_bits(block), []
    for part in range(8):
        for first in (0, LANES):
            low = block.masked(block.nibbles(48 + part // 2 * 32 + first, part % 2), 15)
            fifth = block.masked(block.bytes(16 + first), 16, shift=4 - part)
            made.append(_scaled(block, block.floats(block.builder.or_(low, fifth)), scales, part))
    return made


def six_bits(block: BlockReader) -> Any:
    """Scales of the eight parts of a Q4_K or Q5_K block, then their minima, negated, as one vector."""
    vectors, builder = block.vectors, block.builder
    lower, minima, upper = block.words(4, 3)
    words = [
        _bits(block, lower, 0x3F3F3F3F),
        builder.or_(_bits(block, upper, 0x0F0F0F0F), _bits(block, lower, 0x30303030, 2)),
        _bits(block, minima, 0x3F3F3F3F),
        builder.or_(_bits(block, upper, 0x0F0F0F0F, 4), _bits(block, minima, 0x30303030, 2)),
    ]
    numbers = _bytes_of(block, words)
    ones = vectors.ir.Constant(vectors.of(vectors.int32), [0] * 8 + [1] * 8)
    pair = vectors.ir.Constant(vectors.of(vectors.float32, 2), vectors.ir.Undefined)
    least = builder.fsub(vectors.ir.Constant(vectors.float32, -0.0), block.scale(2))
    for index, value in enumerate((block.scale(0), least)):
        pair = builder.insert_element(pair, value, vectors.ir.Constant(vectors.int32, index))
    both = builder.shuffle_vector(pair, vectors.ir.Constant(pair.type, vectors.ir.Undefined), ones)
    return builder.fmul(builder.sitofp(numbers, vectors.floats), both)


def _bits(block: BlockReader, word: Any, mask: int, shift: int = 0) -> Any:
    """Some bits of an int32 that is shifted right first."""
    vectors, builder = block.vectors, block.builder
    number = vectors.ir.Constant(vectors.int32, shift)
    return builder.and_(builder.lshr(word, number), vectors.ir.Constant(vectors.int32, mask))


def _bytes_of(block: BlockReader, words: Sequence[Any]) -> Any:
    """The bytes of four int32, unsigned, as int32."""
    vectors, builder = block.vectors, block.builder
    packed = vectors.ir.Constant(vectors.of(vectors.int32, 4), vectors.ir.Undefined)
    for index, word in enumerate(words):
        packed = builder.insert_element(packed, word, vectors.ir.Constant(vectors.int32, index))
    return builder.zext(builder.bitcast(packed, vectors.of(vectors.int8)), vectors.words)


def _scaled(block: BlockReader, number: Any, scales: Any, part: int) -> Any:
    vectors = block.vectors
    scale, least = (vectors.shuffled(scales, [index] * LANES) for index in (part, 8 + part))
    return vectors.multiply_add(number, scale, least)


def _q6_k(block: BlockReader) -> list[Any]:
    vectors, builder = block.vectors, block.builder
    scales = builder.fmul(block.signed(192), vectors.broadcast(block.scale(208)))
    made = []
    for index, half, part, first in _SIXTEENTHS:
        low = block.masked(block.nibbles(64 * half + part % 2 * 32 + first, part // 2), 15)
        high = block.masked(block.bytes(128 + 32 * half + first), 0x30, shift=4 - 2 * part)
        number = block.floats(builder.or_(low, high), less=32)
        made.append(builder.fmul(number, vectors.shuffled(scales, [index] * LANES)))
    return made


def _iq4_nl(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    return [block.builder.fmul(block.vectors.levels(block.nibbles(2, upper), _IQ4), scale) for upper in (0, 1)]


def _iq4_xs(block: BlockReader) -> list[Any]:
    """Six-bit scales: the upper two bits of all precede the lower four of all."""
    vectors, builder = block.vectors, block.builder
    high = block.masked(block.spread(vectors.load(block.at(2), vectors.int16, 1), [n % 8 * 2 for n in range(LANES)]), 3)
    low = block.masked(block.spread(block.words(4, 1)[0], [n % 8 * 4 for n in range(LANES)]), 15)
    scales = block.floats(builder.or_(low, builder.shl(high, vectors.all(vectors.int32, 4))), less=32)
    scales = builder.fmul(scales, vectors.broadcast(block.scale(0)))
    made = []
    for part in range(8):
        scale = vectors.shuffled(scales, [part] * LANES)
        numbers = [vectors.levels(block.nibbles(8 + 16 * part, upper), _IQ4) for upper in (0, 1)]
        made += [builder.fmul(each, scale) for each in numbers]
    return made


def _mxfp4(block: BlockReader) -> list[Any]:
    """A byte is the exponent of 32 numbers, minus one because the gguf package doubles the numbers."""
    vectors, builder = block.vectors, block.builder

    def constant(value: int) -> Any:
        return vectors.ir.Constant(vectors.int32, value)

    exponent = builder.zext(vectors.load(block.at(0), vectors.int8, 1), vectors.int32)
    small = builder.shl(constant(0x00200000), exponent)
    usual = builder.shl(builder.sub(exponent, constant(1)), constant(23))
    bits = builder.select(builder.icmp_unsigned("<", exponent, constant(2)), small, usual)
    half = vectors.broadcast(builder.bitcast(bits, vectors.float32))
    numbers = [vectors.e2m1(block.nibbles(1, upper)) for upper in (0, 1)]
    return [builder.fmul(builder.fadd(each, each), half) for each in numbers]


_SIXTEENTHS = [(index, index // 8, index // 2 % 4, index % 2 * LANES) for index in range(16)]
"""For each vector of a block of 256 numbers: its index, half of the block, bit pair of a byte, and first byte."""
_READ: dict[int, Callable[[BlockReader], list[Any]]] = {
    _Q4_0: _q4_0,
    _Q4_1: _q4_1,
    _Q5_0: _q5_0,
    _Q5_1: _q5_1,
    _Q8_0: _q8_0,
    _Q2_K: _q2_k,
    _Q3_K: _q3_k,
    _Q4_K: _q4_k,
    _Q5_K: _q5_k,
    _Q6_K: _q6_k,
    _IQ4_NL: _iq4_nl,
    _IQ4_XS: _iq4_xs,
    _MXFP4: _mxfp4,
}
