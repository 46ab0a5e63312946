"""Blocks of a weight as kernels multiply them, and the order of x that they need.

The numbers of ggml's K types are read as whole words, one byte of each at a time. The scales of a block multiply sums
of products instead of numbers. This saves operations per number, and adds the rounding of one float32 addition.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from moetool.kernels.cpu.ggml_codebooks import CODED
from moetool.kernels.cpu.ggml_numbers import six_bits
from moetool.kernels.cpu.ggml_reader import BlockReader, RowGroup
from moetool.kernels.cpu.kinds import RowKind
from moetool.kernels.cpu.numbers import planes
from moetool.kernels.cpu.vectors import LANES, Vectors, cpu_has_pairs

_PARTS, _PART = 8, 32  # parts of a block of Q4_K or Q5_K, and numbers in a part
_OFFSET = 128.0
_OFFSET_BITS, _SIX_BITS = 0x43000000, 0x003F0000  # float32 bits of 128, and mask of the numbers below 64 that they add


class RowBlock(NamedTuple):
    """A block of a weight.

    Attributes:
        sum_factors: factors of the sums of x (`RowOrder.lanes`); None without sums.
    """

    groups: list[RowGroup]
    sum_factors: Any = None


class RowOrder(NamedTuple):
    """The order in which a block multiplies numbers of x, and the sums of x that follow them.

    Attributes:
        indices: indices of x in the order of the block's numbers.
        summed: numbers of x in a sum.
        lanes: index and factor of the sum in each lane of a vector that follows the numbers; empty without sums.
        narrow: whether the numbers are in bfloat16; sums are in float32 like other numbers.
    """

    indices: tuple[int, ...]
    summed: int = 0
    lanes: tuple[tuple[int, float], ...] = ()
    narrow: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of x that a block reads, sums included."""
        return (2 if self.narrow else 4) * len(self.indices) + 4 * len(self.lanes)


@functools.cache
def row_order(kind: RowKind) -> RowOrder:
    """The order of x for a kind of weight."""
    if kind.ggml in _BY_WORDS:
        return _BY_WORDS[kind.ggml][0](kind.paired)
    return RowOrder(tuple(word * kind.ways + way for way in range(kind.ways) for word in range(kind.words)))


@functools.cache
def paired(kind: RowKind) -> RowKind:
    """The kind that multiplies rows in bfloat16 with the same blocks: by pairs, where the CPU has `avx512_bf16`.

    The products of numbers below 256 and of x are exact in float32, and their sums round as those of single numbers do.
    """
    if kind.ggml not in _BY_WORDS or not cpu_has_pairs():
        return kind
    return replace(kind, name=f"{kind.name}_pairs", paired=True)


def row_block(vectors: Vectors, kind: RowKind, address: Any) -> RowBlock:
    if kind.ggml in _BY_WORDS:
        return _BY_WORDS[kind.ggml][1](BlockReader(vectors, address), kind.paired)
    if kind.ggml in CODED:
        return RowBlock(CODED[kind.ggml](BlockReader(vectors, address)))
    return RowBlock([RowGroup(planes(vectors, kind, address))])


def _q4_k(block: BlockReader, by_pairs: bool) -> RowBlock:
    scales, groups = six_bits(block), []
    for half in (0, 1):
        words = block.words_of(16 + 64 * half)
        for upper in (0, 1):
            if by_pairs:
                numbers = [block.vectors.paired(_shorts(block, words, 8 * byte + 4 * upper)) for byte in (0, 1)]
            else:
                numbers = [block.vectors.nibbles(block.shifted(words, -8 * byte - 4 * upper)) for byte in range(4)]
            groups.append(RowGroup(numbers, _scales_of_parts(block, scales, half, upper)))
    return RowBlock(groups, scales)


def _q5_k(block: BlockReader, by_pairs: bool) -> RowBlock:
    """Each of 32 bytes holds the fifth bits of eight numbers, one of each part."""
    scales, groups = six_bits(block), []
    fifths = block.words_of(16, 16)
    for half in (0, 1):
        words = block.words_of(48 + 64 * half)
        for upper in (0, 1):
            low = block.masked(words, 0x0F0F0F0F, shift=-4 * upper)
            shifts = [4 - 4 * half - upper - 2 * (lane // 8) for lane in range(LANES)]
            fifth = block.masked(block.shifted_each(fifths, shifts), 0x10101010)
            numbers = _offset_bytes(block, block.builder.or_(low, fifth), by_pairs)
            groups.append(RowGroup(numbers, _scales_of_parts(block, scales, half, upper)))
    return RowBlock(groups, scales)


def _scales_of_parts(block: BlockReader, scales: Any, half: int, upper: int) -> Any:
    return block.vectors.shuffled(scales, [4 * half + upper + 2 * (lane // 8) for lane in range(LANES)])


def _q6_k(block: BlockReader, by_pairs: bool) -> RowBlock:
    vectors, builder, groups = block.vectors, block.builder, []
    scales = builder.fmul(block.signed(192), vectors.broadcast(block.scale(208)))
    low, high = [block.words_of(first, 64 + first) for first in (0, 32)], block.words_of(128)
    for quarter in range(4):
        four = block.masked(low[quarter % 2], 0x0F0F0F0F, shift=-4 * (quarter // 2))
        two = block.masked(high, 0x30303030, shift=4 - 2 * quarter)
        lanes = [8 * (lane // 8) + 2 * quarter + lane % 8 // 4 for lane in range(LANES)]
        numbers = _offset_bytes(block, builder.or_(four, two), by_pairs)
        groups.append(RowGroup(numbers, vectors.shuffled(scales, lanes)))
    return RowBlock(groups, scales)


def _offset_bytes(block: BlockReader, words: Any, by_pairs: bool) -> list[Any]:
    """The bytes of each word, which are below 64, plus 128: as bits of float32, without converting integers.

    By pairs in bfloat16: the even bytes, then the odd ones.
    """
    made = []
    if by_pairs:
        offset, mask = (block.vectors.all(block.vectors.int16, bits, 2 * LANES) for bits in (_OFFSET_BITS >> 16, 63))
        for byte in (0, 1):
            shorts = _shorts(block, words, 8 * byte)
            made.append(block.builder.or_(block.builder.and_(shorts, mask), offset))
        return made
    for byte in range(4):
        bits = block.masked(words, _SIX_BITS, shift=16 - 8 * byte)
        whole = block.builder.or_(bits, block.vectors.all(block.vectors.int32, _OFFSET_BITS))
        made.append(block.builder.bitcast(whole, block.vectors.floats))
    return made


def _shorts(block: BlockReader, words: Any, shift: int) -> Any:
    """Each half of each int32, shifted right."""
    shorts = block.builder.bitcast(words, block.vectors.of(block.vectors.int16, 2 * LANES))
    return block.builder.lshr(shorts, block.vectors.all(block.vectors.int16, shift, 2 * LANES)) if shift else shorts


def _bytes_in_order(by_pairs: bool) -> list[tuple[int, int]]:
    """Word and byte in it of each of 64 bytes, in the order of a block's numbers."""
    if by_pairs:
        return [(n // 2, 2 * (n % 2) + byte) for byte in (0, 1) for n in range(2 * LANES)]
    return [(lane, byte) for byte in range(4) for lane in range(LANES)]


def _order_of_parts(offset: float, by_pairs: bool) -> RowOrder:
    """Order for a block that yields the lower or upper halves of 64 bytes, some bytes of each word at a time."""
    indices = tuple(
        _PART * (4 * half + upper + 2 * (lane // 8)) + 4 * (lane % 8) + byte
        for half in (0, 1)
        for upper in (0, 1)
        for lane, byte in _bytes_in_order(by_pairs)
    )
    lanes = tuple((part, factor) for factor in (-offset, 1.0) for part in range(_PARTS))
    return RowOrder(indices, _PART, lanes, by_pairs)


def _order_of_quarters(by_pairs: bool) -> RowOrder:
    indices = tuple(
        128 * (lane // 8) + 32 * quarter + 4 * (lane % 8) + byte
        for quarter in range(4)
        for lane, byte in _bytes_in_order(by_pairs)
    )
    lanes = tuple((part, -_OFFSET - 32) for part in range(LANES))  # whose numbers begin at -32
    return RowOrder(indices, LANES, lanes, by_pairs)


_BY_WORDS: dict[int | None, tuple[Callable[[bool], RowOrder], Callable[[BlockReader, bool], RowBlock]]] = {
    12: (partial(_order_of_parts, 0.0), _q4_k),
    13: (partial(_order_of_parts, _OFFSET), _q5_k),
    14: (_order_of_quarters, _q6_k),
}
"""Order and reader of ggml's types."""
