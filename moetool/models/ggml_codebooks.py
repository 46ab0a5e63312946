"""Numbers in ggml's blocks of codebooks (IQ1 to IQ3) and of ternary digits (TQ).

A block of 256 numbers holds places in a codebook of 4 or 8 numbers each, signs, and scales. The codebooks are the gguf
package's. A product of a number and its scale has at most 24 bits, so it is exact.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moetool.models.ggml_reader import BlockReader, RowGroup
from moetool.models.llvm_vectors import LANES

_VECTORS, _GROUPS = 16, 8  # of 16 and of 32 numbers in a block
_FEW = 256
"""Most places of a codebook in float32 (`tests/bench/test_scaled_weights.py`)."""
_SIGN = -(2**31)
_EIGHTH = struct.unpack("<i", struct.pack("<f", 0.125))[0]
"""Bits of the number that is added to all numbers of IQ1's codebook, or subtracted."""


def coded_groups(block: BlockReader, kind: int) -> list[RowGroup]:
    """Numbers of a block in their order in the weight, with the scales of groups.

    Args:
        kind: ggml's type, one of `CODED`.
    """
    return CODED[kind](block)


@functools.cache
def _codebook(name: str) -> np.ndarray:
    """A type's codebook [places, 4 or 8]: float32 where it leaves most of the fastest cache free, else int8."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    dtype = np.float32 if kind.grid_shape[0] <= _FEW else np.int8
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape), dtype=dtype)


def _looked_up(block: BlockReader, name: str, places: Sequence[Any]) -> Any:
    """The numbers at int64 places of a codebook, `LANES` in all, as float32."""
    vectors, codebook = block.vectors, _codebook(name)
    size, first = codebook.shape[1], vectors.number(codebook.ctypes.data)
    wide = codebook.dtype == np.float32
    kind, width = vectors.of(vectors.float32 if wide else vectors.int8, size), size * codebook.itemsize
    parts = [vectors.load(block.builder.add(first, vectors.times(place, width)), kind) for place in places]
    while len(parts) > 1:
        every = [*range(2 * parts[0].type.count)]
        parts = [vectors.merged(*pair, every) for pair in zip(parts[::2], parts[1::2], strict=True)]
    if wide:
        return parts[0]
    return block.builder.sitofp(block.builder.sext(parts[0], vectors.words), vectors.floats)


def _place(block: BlockReader, low: int, word: Any, moved: int, mask: int) -> Any:
    """A place in a codebook: a byte, and further bits of an int64 that are moved up, or down if negative."""
    builder, number = block.builder, block.vectors.number
    shift = builder.shl if moved > 0 else builder.lshr
    high = builder.and_(shift(word, number(abs(moved))), number(mask))
    return builder.or_(block.byte(low), high)


def _signed(block: BlockReader, numbers: Any, words: Any, first: int) -> Any:
    """Numbers negated by the bits of their words, from `first` on in the order of the lanes."""
    vectors, builder = block.vectors, block.builder
    moved = block.moved_by(words, [31 - first - lane for lane in range(LANES)])
    bits = builder.and_(moved, vectors.all(vectors.int32, _SIGN))
    return builder.bitcast(builder.xor(builder.bitcast(numbers, vectors.words), bits), vectors.floats)


def _eighth_signs(block: BlockReader, sevens: Any) -> Any:
    """Bytes of words with seven signs, and an eighth that makes the number of negative ones even."""
    builder, parity = block.builder, sevens
    for places in (4, 2, 1):
        parity = builder.xor(parity, block.moved(parity, -places))
    return builder.or_(sevens, block.moved(block.low(parity, 0x01010101), 7))


def _signs_of_words(block: BlockReader, words: Any) -> Any:
    """Four times eight signs of words whose lower 28 bits hold four times seven."""
    sevens = [block.low(block.moved(words, byte), 0x7F << 8 * byte) for byte in range(4)]
    return _eighth_signs(block, functools.reduce(block.builder.or_, sevens))


def _halved(block: BlockReader, numbers: Any, quarter: float) -> Any:
    """Scales: small int32 and a half, times the block's scale and a constant."""
    vectors, builder = block.vectors, block.builder
    scale = builder.fmul(block.scale(0), vectors.ir.Constant(vectors.float32, quarter))
    halves = builder.fadd(block.floats(numbers), vectors.all(vectors.float32, 0.5))
    return builder.fmul(halves, vectors.broadcast(scale))


def _odd(block: BlockReader, numbers: Any, scale: Any) -> Any:
    """Scales: small int32, twice and one, times the block's scale."""
    vectors, builder = block.vectors, block.builder
    odd = builder.or_(block.moved(numbers, 1), vectors.all(vectors.int32, 1))
    return builder.fmul(block.floats(odd), vectors.broadcast(scale))


def _each(block: BlockReader, scales: Any, lane: int) -> Any:
    return block.vectors.chosen(scales, [lane] * LANES)


def _nibbles(block: BlockReader, offset: int) -> Any:
    """The 16 halves of 8 bytes, the lower half first, as int32."""
    vectors, builder = block.vectors, block.builder
    stored = vectors.load(block.at(offset), vectors.of(vectors.int8, 8), 1)
    words = builder.zext(vectors.chosen(stored, [lane // 2 for lane in range(LANES)]), vectors.words)
    return block.low(block.moved_by(words, [-4 * (lane % 2) for lane in range(LANES)]), 15)


def _shorts(block: BlockReader, offset: int, count: int) -> Any:
    """int16, unsigned, each in `LANES` / `count` consecutive int32."""
    vectors = block.vectors
    stored = vectors.load(block.at(offset), vectors.of(vectors.int16, count), 1)
    return block.builder.zext(vectors.chosen(stored, [lane * count // LANES for lane in range(LANES)]), vectors.words)


def _iq2_xxs(block: BlockReader) -> list[RowGroup]:
    words, groups = block.words_of(2), []  # places and signs by turns
    signs, scales = _signs_of_words(block, words), _halved(block, block.moved(words, -28), 0.25)
    for group in range(_GROUPS):
        planes = []
        for half in (0, 1):
            places = [block.byte(2 + 8 * group + 2 * half + n) for n in (0, 1)]
            numbers = _looked_up(block, "IQ2_XXS", places)
            planes.append(_signed(block, numbers, _each(block, signs, 2 * group + 1), LANES * half))
        groups.append(RowGroup(planes, _each(block, scales, 2 * group + 1)))
    return groups


def _iq2_xs(block: BlockReader) -> list[RowGroup]:
    """Nine bits of a place and seven signs."""
    words, groups = block.words_of(2), []
    sevens = block.builder.or_(block.low(words, 0x7F, moved=-9), block.low(words, 0x7F00, moved=-17))
    signs, scales = _eighth_signs(block, sevens), _halved(block, _nibbles(block, 66), 0.25)
    for vector in range(_VECTORS):
        shorts = [block.short(2 + 4 * vector + 2 * n) for n in (0, 1)]
        places = [block.builder.and_(short, block.vectors.number(511)) for short in shorts]
        numbers = _looked_up(block, "IQ2_XS", places)
        plane = _signed(block, numbers, _each(block, signs, vector), 0)
        groups.append(RowGroup([plane], _each(block, scales, vector)))
    return groups


def _iq2_s(block: BlockReader) -> list[RowGroup]:
    scales, groups = _halved(block, _nibbles(block, 74), 0.25), []
    for vector in range(_VECTORS):
        group, half = divmod(vector, 2)
        high = block.byte(66 + group)
        places = [_place(block, 2 + 2 * vector + n, high, 8 - 4 * half - 2 * n, 0x300) for n in (0, 1)]
        signs = block.vectors.broadcast(block.words(34 + 4 * group, 1)[0])
        plane = _signed(block, _looked_up(block, "IQ2_S", places), signs, LANES * half)
        groups.append(RowGroup([plane], _each(block, scales, vector)))
    return groups


def _iq3_xxs(block: BlockReader) -> list[RowGroup]:
    words, groups = block.words_of(34), []  # the last eight are the signs and scales
    signs, scales = _signs_of_words(block, words), _halved(block, block.moved(words, -28), 0.5)
    for group in range(_GROUPS):
        planes = []
        for half in (0, 1):
            places = [block.byte(2 + 8 * group + 4 * half + n) for n in range(4)]
            numbers = _looked_up(block, "IQ3_XXS", places)
            planes.append(_signed(block, numbers, _each(block, signs, _GROUPS + group), LANES * half))
        groups.append(RowGroup(planes, _each(block, scales, _GROUPS + group)))
    return groups


def _iq3_s(block: BlockReader) -> list[RowGroup]:
    nibbles = block.low(block.spread(block.words(106, 1)[0], [lane % 8 * 4 for lane in range(LANES)]), 15)
    scales, groups = _odd(block, nibbles, block.scale(0)), []
    for group in range(_GROUPS):
        high, planes = block.byte(66 + group), []
        signs = block.vectors.broadcast(block.words(74 + 4 * group, 1)[0])
        for half in (0, 1):
            places = [_place(block, 2 + 8 * group + 4 * half + n, high, 8 - 4 * half - n, 0x100) for n in range(4)]
            planes.append(_signed(block, _looked_up(block, "IQ3_S", places), signs, LANES * half))
        groups.append(RowGroup(planes, _each(block, scales, group)))
    return groups


def _iq1_s(block: BlockReader) -> list[RowGroup]:
    vectors, builder, groups = block.vectors, block.builder, []
    words = _shorts(block, 34, _GROUPS)
    scales = _odd(block, block.low(words, 7, moved=-12), block.scale(0))
    added = _with_eighth(block, block.moved(words, 16))
    for group in range(_GROUPS):
        high, planes = block.short(34 + 2 * group), []
        for half in (0, 1):
            places = [_place(block, 2 + 4 * group + 2 * half + n, high, 8 - 6 * half - 3 * n, 0x700) for n in (0, 1)]
            planes.append(builder.fadd(_looked_up(block, "IQ1_S", places), vectors.chosen(added, [2 * group] * LANES)))
        groups.append(RowGroup(planes, _each(block, scales, 2 * group)))
    return groups


def _iq1_m(block: BlockReader) -> list[RowGroup]:
    """The upper four bits of four int16 make the block's scale, the lower ones four scales each."""
    vectors, builder, groups = block.vectors, block.builder, []
    four = vectors.load(block.at(48), vectors.int64, 1)
    bits = [
        builder.and_(builder.lshr(four, vectors.number(12 * (part + 1))), vectors.number(15 << 4 * part))
        for part in range(4)
    ]
    whole = builder.trunc(functools.reduce(builder.or_, bits), vectors.int16)
    scale = builder.fpext(builder.bitcast(whole, vectors.half), vectors.float32)
    places = [-3 * (lane % 4) for lane in range(LANES)]
    scales = _odd(block, block.low(block.moved_by(_shorts(block, 48, 4), places), 7), scale)
    for vector in range(_VECTORS):
        high = block.byte(32 + vector)
        places_of = [_place(block, 2 * vector + n, high, 8 - 4 * n, 0x700) for n in (0, 1)]
        word = vectors.broadcast(builder.trunc(high, vectors.int32))
        added = _with_eighth(block, block.moved_by(word, [28] * (LANES // 2) + [24] * (LANES // 2)))
        plane = builder.fadd(_looked_up(block, "IQ1_S", places_of), added)
        groups.append(RowGroup([plane], _each(block, scales, vector)))
    return groups


def _with_eighth(block: BlockReader, words: Any) -> Any:
    """An eighth with the highest bit of each word as its sign."""
    vectors = block.vectors
    bits = block.builder.or_(block.low(words, _SIGN), vectors.all(vectors.int32, _EIGHTH))
    return block.builder.bitcast(bits, vectors.floats)


def _tq1_0(block: BlockReader) -> list[RowGroup]:
    """Ternary digits: a byte is a fraction of 256, whose digits appear as it is multiplied by three."""
    vectors, planes = block.vectors, []
    rest = {first: block.bytes(first) for first in (0, LANES, 2 * LANES)}
    for firsts in ((0, LANES), (2 * LANES,)):
        for _ in range(5):
            for first in firsts:
                digit, rest[first] = _digit(block, rest[first])
                planes.append(digit)
    last = block.low(block.spread(block.words(48, 1)[0], [lane % 4 * 8 for lane in range(LANES)]), 255)
    powers = vectors.ir.Constant(vectors.words, [3 ** (lane // 4) for lane in range(LANES)])
    planes.append(_digit(block, block.low(block.builder.mul(last, powers), 255))[0])
    return _in_pairs(planes, vectors.broadcast(block.scale(52)))


def _digit(block: BlockReader, fraction: Any) -> tuple[Any, Any]:
    """The next digit less one, as float32, and the fraction that follows."""
    thrice = block.builder.add(fraction, block.moved(fraction, 1))
    return block.floats(block.moved(thrice, -8), less=1), block.low(thrice, 255)


def _tq2_0(block: BlockReader) -> list[RowGroup]:
    vectors, planes = block.vectors, []
    for half in (0, 1):
        for part in range(4):
            for first in (0, LANES):
                bits = block.low(block.bytes(32 * half + first), 3, moved=-2 * part)
                planes.append(block.floats(bits, less=1))
    return _in_pairs(planes, vectors.broadcast(block.scale(64)))


def _in_pairs(planes: list[Any], scale: Any) -> list[RowGroup]:
    return [RowGroup(planes[first : first + 2], scale) for first in range(0, len(planes), 2)]


CODED: dict[int, Callable[[BlockReader], list[RowGroup]]] = {
    16: _iq2_xxs,
    17: _iq2_xs,
    18: _iq3_xxs,
    19: _iq1_s,
    21: _iq3_s,
    22: _iq2_s,
    29: _iq1_m,
    34: _tq1_0,
    35: _tq2_0,
}
"""By ggml's type."""
