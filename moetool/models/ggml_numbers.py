"""Numbers in ggml's blocks as vectors of float32, in their order in the weight.

They are those of the gguf package to the bit. A product of a number and its scales has at most 24 bits, so it is exact,
and only the subtraction of a minimum rounds.
"""

from collections.abc import Callable
from typing import Any

from moetool.models.llvm_vectors import LANES, Vectors

_Q4_0, _Q5_0, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _MXFP4 = 2, 6, 8, 12, 13, 14, 39


def block_numbers(vectors: Vectors, kind: int, address: Any) -> list[Any]:
    """The numbers of a block, `LANES` a vector.

    Args:
        kind: ggml's type.
    """
    return _READ[kind](BlockReader(vectors, address))


class BlockReader:
    """A block in memory."""

    def __init__(self, vectors: Vectors, address: Any) -> None:
        self.vectors, self.builder, self._address = vectors, vectors.builder, address
        self._loaded: dict[int, Any] = {}

    def at(self, offset: int) -> Any:
        """The address of a byte."""
        return self.builder.add(self._address, self.vectors.number(offset))

    def bytes(self, offset: int) -> Any:
        """`LANES` bytes as int32 without signs."""
        if offset not in self._loaded:
            stored = self.vectors.load(self.at(offset), self.vectors.of(self.vectors.int8), 1)
            self._loaded[offset] = self.builder.zext(stored, self.vectors.words)
        return self._loaded[offset]

    def signed(self, offset: int) -> Any:
        """`LANES` bytes as float32."""
        stored = self.vectors.load(self.at(offset), self.vectors.of(self.vectors.int8), 1)
        return self.builder.sitofp(self.builder.sext(stored, self.vectors.words), self.vectors.floats)

    def scale(self, offset: int) -> Any:
        """A number in float16, as float32."""
        half = self.vectors.load(self.at(offset), self.vectors.half, 1)
        return self.builder.fpext(half, self.vectors.float32)

    def words(self, offset: int, count: int) -> list[Any]:
        """int32 numbers."""
        return [self.vectors.load(self.at(offset + 4 * n), self.vectors.int32, 1) for n in range(count)]

    def nibbles(self, offset: int, upper: int) -> Any:
        """The lower or upper half of `LANES` bytes, as int32 whose bits above it are no number."""
        return self.moved(self.bytes(offset), -4 * upper)

    def low(self, words: Any, mask: int, moved: int = 0) -> Any:
        """Some of the bits of each word, moved up or down."""
        return self.builder.and_(self.moved(words, moved), self.vectors.all(self.vectors.int32, mask))

    def moved(self, words: Any, places: int) -> Any:
        """The bits of each int32 moved up, or down if negative."""
        return self.moved_by(words, [places] * LANES) if places else words

    def moved_by(self, words: Any, places: list[int]) -> Any:
        """The bits of each int32 moved by a number of its own, all up or all down."""
        shift = self.builder.shl if max(places) > 0 else self.builder.lshr
        return shift(words, self.vectors.ir.Constant(words.type, [abs(each) for each in places]))

    def words_of(self, offset: int, second: int | None = None) -> Any:
        """64 bytes as int32, or 32 from each of two offsets."""
        if second is None:
            return self.vectors.load(self.at(offset), self.vectors.words, 1)
        half = self.vectors.of(self.vectors.int32, LANES // 2)
        parts = [self.vectors.load(self.at(each), half, 1) for each in (offset, second)]
        every = self.vectors.ir.Constant(self.vectors.words, [*range(LANES)])
        return self.builder.shuffle_vector(*parts, every)

    def floats(self, words: Any, less: int = 0) -> Any:
        """Small int32 as float32, less a constant."""
        if less:
            words = self.builder.sub(words, self.vectors.all(self.vectors.int32, less))
        return self.builder.sitofp(words, self.vectors.floats)


def _q4_0(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    numbers = [block.floats(block.low(block.nibbles(2, upper), 15), less=8) for upper in (0, 1)]
    return [block.builder.fmul(each, scale) for each in numbers]


def _q5_0(block: BlockReader) -> list[Any]:
    """Four bytes hold the fifth bits of 32 numbers."""
    vectors, builder = block.vectors, block.builder
    scale = vectors.broadcast(block.scale(0))
    places = vectors.ir.Constant(vectors.words, [*range(LANES)])
    made = []
    for upper in (0, 1):
        fifths = vectors.load(block.at(2 + 2 * upper), vectors.int16, 1)
        wide = vectors.broadcast(builder.zext(fifths, vectors.int32))
        fifth = block.low(builder.lshr(wide, places), 1)
        number = builder.or_(block.low(block.nibbles(6, upper), 15), builder.shl(fifth, vectors.all(vectors.int32, 4)))
        made.append(builder.fmul(block.floats(number, less=16), scale))
    return made


def _q8_0(block: BlockReader) -> list[Any]:
    scale = block.vectors.broadcast(block.scale(0))
    return [block.builder.fmul(block.signed(2 + first), scale) for first in (0, LANES)]


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
            low = block.low(block.nibbles(48 + part // 2 * 32 + first, part % 2), 15)
            fifth = block.low(block.bytes(16 + first), 16, moved=4 - part)
            made.append(_scaled(block, block.floats(block.builder.or_(low, fifth)), scales, part))
    return made


def six_bits(block: BlockReader) -> Any:
    """Of Q4_K and Q5_K the scales of eight parts of a block, and their minima, negative."""
    vectors, builder = block.vectors, block.builder

    def bits(word: Any, mask: int, moved: int = 0) -> Any:
        number = vectors.ir.Constant(vectors.int32, moved)
        return builder.and_(builder.lshr(word, number), vectors.ir.Constant(vectors.int32, mask))

    lower, minima, upper = block.words(4, 3)
    words = [
        bits(lower, 0x3F3F3F3F),
        builder.or_(bits(upper, 0x0F0F0F0F), bits(lower, 0x30303030, 2)),
        bits(minima, 0x3F3F3F3F),
        builder.or_(bits(upper, 0x0F0F0F0F, 4), bits(minima, 0x30303030, 2)),
    ]
    packed = vectors.ir.Constant(vectors.of(vectors.int32, 4), vectors.ir.Undefined)
    for place, word in enumerate(words):
        packed = builder.insert_element(packed, word, vectors.ir.Constant(vectors.int32, place))
    numbers = builder.zext(builder.bitcast(packed, vectors.of(vectors.int8)), vectors.words)
    ones = vectors.ir.Constant(vectors.of(vectors.int32), [0] * 8 + [1] * 8)
    pair = vectors.ir.Constant(vectors.of(vectors.float32, 2), vectors.ir.Undefined)
    least = builder.fsub(vectors.ir.Constant(vectors.float32, -0.0), block.scale(2))
    for place, value in enumerate((block.scale(0), least)):
        pair = builder.insert_element(pair, value, vectors.ir.Constant(vectors.int32, place))
    both = builder.shuffle_vector(pair, vectors.ir.Constant(pair.type, vectors.ir.Undefined), ones)
    return builder.fmul(builder.sitofp(numbers, vectors.floats), both)


def _scaled(block: BlockReader, number: Any, scales: Any, part: int) -> Any:
    vectors = block.vectors
    scale, least = (vectors.chosen(scales, [place] * LANES) for place in (part, 8 + part))
    return vectors.multiply_add(number, scale, least)


def _q6_k(block: BlockReader) -> list[Any]:
    vectors, builder = block.vectors, block.builder
    scales = builder.fmul(block.signed(192), vectors.broadcast(block.scale(208)))
    made = []
    for place in range(16):
        half, part, first = place // 8, place // 2 % 4, place % 2 * LANES
        low = block.low(block.nibbles(64 * half + part % 2 * 32 + first, part // 2), 15)
        high = block.low(block.bytes(128 + 32 * half + first), 0x30, moved=4 - 2 * part)
        number = block.floats(builder.or_(low, high), less=32)
        made.append(builder.fmul(number, vectors.chosen(scales, [place] * LANES)))
    return made


def _mxfp4(block: BlockReader) -> list[Any]:
    """A byte is the exponent of 32 numbers, less one for the gguf package, which doubles the numbers."""
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


_READ: dict[int, Callable[[BlockReader], list[Any]]] = {
    _Q4_0: _q4_0,
    _Q5_0: _q5_0,
    _Q8_0: _q8_0,
    _Q4_K: _q4_k,
    _Q5_K: _q5_k,
    _Q6_K: _q6_k,
    _MXFP4: _mxfp4,
}
