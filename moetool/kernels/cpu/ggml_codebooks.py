"""Numbers in ggml's blocks of codebooks (IQ1 to IQ3) and of ternary digits (TQ).

A block of 256 numbers holds indices of codebook entries, 4 or 8 numbers each, with signs and scales. The codebooks are
the gguf package's. A product of a number and its scale has at most 24 bits, so it is exact.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moetool.kernels.cpu.ggml_reader import BlockReader, RowGroup
from moetool.kernels.cpu.vectors import LANES

_VECTORS, _GROUPS = 16, 8  # vectors of 16 and groups of 32 numbers in a block
_FEW = 256
"""Most entries of a codebook in float32 (`tests/bench/test_scaled_weights.py`)."""
_SIGN = -(2**31)
_EIGHTH = struct.unpack("<i", struct.pack("<f", 0.125))[0]
"""Bits of 0.125, which IQ1 adds to all numbers of its codebook, or subtracts."""


@functools.cache
def _codebook(name: str) -> np.ndarray:
    """A type's codebook [entries, 4 or 8]: float32 if that leaves most of the L1 cache free, else int8."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    dtype = np.float32 if kind.grid_shape[0] <= _FEW else np.int8
    return np.ascontiguousarray(kind.grid.reshape(kind.grid_shape), dtype=dtype)


def _looked_up(block: BlockReader, name: str, indices: Sequence[Any]) -> Any:
    """Look up codebook entries by int64 indices: `LANES` numbers in all, as float32."""
    vectors, codebook = block.vectors, _codebook(name)
    size, first = codebook.shape[1], vectors.number(codebook.ctypes.data)
    wide = codebook.dtype == np.float32
    kind, width = vectors.of(vectors.float32 if wide else vectors.int8, size), size * codebook.itemsize
    parts = [vectors.load(block.builder.add(first, vectors.times(index, width)), kind) for index in indices]
    while len(parts) > 1:
        every = [*range(2 * parts[0].type.count)]
        parts = [vectors.merged(*pair, every) for pair in zip(parts[::2], parts[1::2], strict=True)]
    if wide:
        return parts[0]
    return block.builder.sitofp(block.builder.sext(parts[0], vectors.words), vectors.floats)


def _index(block: BlockReader, low: int, word: Any, shift: int, mask: int) -> Any:
    """A codebook index: a byte, and further bits of an int64 that is shifted left, or right if negative."""
    builder, number = block.builder, block.vectors.number
    shifted = (builder.shl if shift > 0 else builder.lshr)(word, number(abs(shift)))
    return builder.or_(block.byte(low), builder.and_(shifted, number(mask)))


def _signed(block: BlockReader, numbers: Any, words: Any, first: int) -> Any:
    """Negate the numbers whose sign bit is set: bit `first` + lane of each lane's word."""
    vectors, builder = block.vectors, block.builder
    shifted = block.shifted_each(words, [31 - first - lane for lane in range(LANES)])
    bits = builder.and_(shifted, vectors.all(vectors.int32, _SIGN))
    return builder.bitcast(builder.xor(builder.bitcast(numbers, vectors.words), bits), vectors.floats)


def _eighth_signs(block: BlockReader, sevens: Any) -> Any:
    """Add an eighth sign bit to the seven in each byte, so that the number of negative signs is even."""
    builder, parity = block.builder, sevens
    for bits in (4, 2, 1):
        parity = builder.xor(parity, block.shifted(parity, -bits))
    return builder.or_(sevens, block.shifted(block.masked(parity, 0x01010101), 7))


def _signs_of_words(block: BlockReader, words: Any) -> Any:
    """Eight sign bits in each of four bytes, from words whose lower 28 bits hold four times seven."""
    sevens = [block.masked(block.shifted(words, byte), 0x7F << 8 * byte) for byte in range(4)]
    return _eighth_signs(block, functools.reduce(block.builder.or_, sevens))


def _halved(block: BlockReader, numbers: Any, factor: float) -> Any:
    """Scales (n + 0.5) * block scale * `factor`, from small int32 n."""
    vectors, builder = block.vectors, block.builder
    scale = builder.fmul(block.scale(0), vectors.ir.Constant(vectors.float32, factor))
    halves = builder.fadd(block.floats(numbers), vectors.all(vectors.float32, 0.5))
    return builder.fmul(halves, vectors.broadcast(scale))


def _odd(block: BlockReader, numbers: Any, scale: Any) -> Any:
    """Scales (2 * n + 1) * `scale`, from small int32 n."""
    vectors, builder = block.vectors, block.builder
    odd = builder.or_(block.shifted(numbers, 1), vectors.all(vectors.int32, 1))
    return builder.fmul(block.floats(odd), vectors.broadcast(scale))


def _repeated(block: BlockReader, scales: Any, lane: int) -> Any:
    """One lane of a vector in all lanes."""
    return block.vectors.shuffled(scales, [lane] * LANES)


def _nibbles(block: BlockReader, offset: int) -> Any:
    """The 16 halves of 8 bytes, the lower half first, as int32."""
    vectors, builder = block.vectors, block.builder
    stored = vectors.load(block.at(offset), vectors.of(vectors.int8, 8), 1)
    words = builder.zext(vectors.shuffled(stored, [lane // 2 for lane in range(LANES)]), vectors.words)
    return block.masked(block.shifted_each(words, [-4 * (lane % 2) for lane in range(LANES)]), 15)


def _shorts(block: BlockReader, offset: int, count: int) -> Any:
    """`count` unsigned int16, each in `LANES` / `count` consecutive int32."""
    vectors = block.vectors
    stored = vectors.load(block.at(offset), vectors.of(vectors.int16, count), 1)
    return block.builder.zext(vectors.shuffled(stored, [lane * count // LANES for lane in range(LANES)]), vectors.words)


def _iq2_xxs(block: BlockReader) -> list[RowGroup]:
    words, groups = block.words_of(2), []  # indices and signs alternate
    signs, scales = _signs_of_words(block, words), _halved(block, block.shifted(words, -28), 0.25)
    for group in range(_GROUPS):
        planes = []
        for half in (0, 1):
            indices = [block.byte(2 + 8 * group + 2 * half + n) for n in (0, 1)]
            numbers = _looked_up(block, "IQ2_XXS", indices)
            planes.append(_signed(block, numbers, _repeated(block, signs, 2 * group + 1), LANES * half))
        groups.append(RowGroup(planes, _repeated(block, scales, 2 * group + 1)))
    return groups


def _iq2_xs(block: BlockReader) -> list[RowGroup]:
    """An int16 holds a nine-bit index and seven signs."""
    words, groups = block.words_of(2), []
    sevens = block.builder.or_(block.masked(words, 0x7F, shift=-9), block.masked(words, 0x7F00, shift=-17))
    signs, scales = _eighth_signs(block, sevens), _halved(block, _nibbles(block, 66), 0.25)
    for vector in range(_VECTORS):
        shorts = [block.short(2 + 4 * vector + 2 * n) for n in (0, 1)]
        indices = [block.builder.and_(short, block.vectors.number(511)) for short in shorts]
        numbers = _looked_up(block, "IQ2_XS", indices)
        plane = _signed(block, numbers, _repeated(block, signs, vector), 0)
        groups.append(RowGroup([plane], _repeated(block, scales, vector)))
    return groups


def _iq2_s(block: BlockReader) -> list[RowGroup]:
    scales, groups = _halved(block, _nibbles(block, 74), 0.25), []
    for vector in range(_VECTORS):
        group, half = divmod(vector, 2)
        high = block.byte(66 + group)
        indices = [_index(block, 2 + 2 * vector + n, high, 8 - 4 * half - 2 * n, 0x300) for n in (0, 1)]
        signs = block.vectors.broadcast(block.words(34 + 4 * group, 1)[0])
        plane = _signed(block, _looked_up(block, "IQ2_S", indices), signs, LANES * half)
        groups.append(RowGroup([plane], _repeated(block, scales, vector)))
    return groups


def _iq3_xxs(block: BlockReader) -> list[RowGroup]:
    words, groups = block.words_of(34), []  # the last eight are the signs and scales
    signs, scales = _signs_of_words(block, words), _halved(block, block.shifted(words, -28), 0.5)
    for group in range(_GROUPS):
        planes = []
        for half in (0, 1):
            indices = [block.byte(2 + 8 * group + 4 * half + n) for n in range(4)]
            numbers = _looked_up(block, "IQ3_XXS", indices)
            planes.append(_signed(block, numbers, _repeated(block, signs, _GROUPS + group), LANES * half))
        groups.append(RowGroup(planes, _repeated(block, scales, _GROUPS + group)))
    return groups


def _iq3_s(block: BlockReader) -> list[RowGroup]:
    nibbles = block.masked(block.spread(block.words(106, 1)[0], [lane % 8 * 4 for lane in range(LANES)]), 15)
    scales, groups = _odd(block, nibbles, block.scale(0)), []
    for group in range(_GROUPS):
        high, planes = block.byte(66 + group), []
        signs = block.vectors.broadcast(block.words(74 + 4 * group, 1)[0])
        for half in (0, 1):
            indices = [_index(block, 2 + 8 * group + 4 * half + n, high, 8 - 4 * half - n, 0x100) for n in range(4)]
            planes.append(_signed(block, _looked_up(block, "IQ3_S", indices), signs, LANES * half))
        groups.append(RowGroup(planes, _repeated(block, scales, group)))
    return groups


def _iq1_s(block: BlockReader) -> list[RowGroup]:
    builder, groups = block.builder, []
    words = _shorts(block, 34, _GROUPS)
    scales = _odd(block, block.masked(words, 7, shift=-12), block.scale(0))
    offsets = _eighths(block, block.shifted(words, 16))
    for group in range(_GROUPS):
        high, planes = block.short(34 + 2 * group), []
        for half in (0, 1):
            indices = [_index(block, 2 + 4 * group + 2 * half + n, high, 8 - 6 * half - 3 * n, 0x700) for n in (0, 1)]
            planes.append(builder.fadd(_looked_up(block, "IQ1_S", indices), _repeated(block, offsets, 2 * group)))
        groups.append(RowGroup(planes, _repeated(block, scales, 2 * group)))
    return groups


def _iq1_m(block: BlockReader) -> list[RowGroup]:
    """The upper four bits of four int16 make the block's scale; the lower twelve of each hold four scales."""
    vectors, builder, groups = block.vectors, block.builder, []
    four = vectors.load(block.at(48), vectors.int64, 1)
    bits = [
        builder.and_(builder.lshr(four, vectors.number(12 * (part + 1))), vectors.number(15 << 4 * part))
        for part in range(4)
    ]
    whole = builder.trunc(functools.reduce(builder.or_, bits), vectors.int16)
    scale = builder.fpext(builder.bitcast(whole, vectors.half), vectors.float32)
    shifts = [-3 * (lane % 4) for lane in range(LANES)]
    scales = _odd(block, block.masked(block.shifted_each(_shorts(block, 48, 4), shifts), 7), scale)
    for vector in range(_VECTORS):
        high = block.byte(32 + vector)
        indices = [_index(block, 2 * vector + n, high, 8 - 4 * n, 0x700) for n in (0, 1)]
        word = vectors.broadcast(builder.trunc(high, vectors.int32))
        offsets = _eighths(block, block.shifted_each(word, [28] * (LANES // 2) + [24] * (LANES // 2)))
        plane = builder.fadd(_looked_up(block, "IQ1_S", indices), offsets)
        groups.append(RowGroup([plane], _repeated(block, scales, vector)))
    return groups


def _eighths(block: BlockReader, words: Any) -> Any:
    """0.125 with the sign bit of each word."""
    vectors = block.vectors
    bits = block.builder.or_(block.masked(words, _SIGN), vectors.all(vectors.int32, _EIGHTH))
    return block.builder.bitcast(bits, vectors.floats)


def _tq1_0(block: BlockReader) -> list[RowGroup]:
    """A byte is a fraction of 256; multiplying it by three carries out the next of its ternary digits."""
    vectors, planes = block.vectors, []
    rest = {first: block.bytes(first) for first in (0, LANES, 2 * LANES)}
    for firsts in ((0, LANES), (2 * LANES,)):
        for _ in range(5):
            for first in firsts:
                digit, rest[first] = _digit(block, rest[first])
                planes.append(digit)
    last = block.masked(block.spread(block.words(48, 1)[0], [lane % 4 * 8 for lane in range(LANES)]), 255)
    powers = vectors.ir.Constant(vectors.words, [3 ** (lane // 4) for lane in range(LANES)])
    planes.append(_digit(block, block.masked(block.builder.mul(last, powers), 255))[0])
    return _in_pairs(planes, vectors.broadcast(block.scale(52)))


def _digit(block: BlockReader, fraction: Any) -> tuple[Any, Any]:
    """The next digit minus one, as float32, and the remaining fraction."""
    thrice = block.builder.add(fraction, block.shifted(fraction, 1))
    return block.floats(block.shifted(thrice, -8), less=1), block.masked(thrice, 255)


def _tq2_0(block: BlockReader) -> list[RowGroup]:
    vectors, planes = block.vectors, []
    for half in (0, 1):
        for part in range(4):
            for first in (0, LANES):
                bits = block.masked(block.bytes(32 * half + first), 3, shift=-2 * part)
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
"""Functions that read the numbers and scales of a block, by ggml type."""
