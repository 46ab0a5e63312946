"""Blocks of a weight as kernels multiply them, and the order of x that they need.

The numbers of ggml's K types are read as whole words, one byte of each at a time. The scales of a block multiply sums
of products instead of numbers. This saves operations per number, and adds the rounding of one float32 addition.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from moetool.kernels.cpu.ggml_codebooks import CODED
from moetool.kernels.cpu.ggml_numbers import six_bits
from moetool.kernels.cpu.ggml_reader import BlockReader, RowGroup
from moetool.kernels.cpu.kinds import RowKind
from moetool.kernels.cpu.numbers import planes
from moetool.kernels.cpu.vectors import LANES, Vectors

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
    """

    indices: tuple[int, ...]
    summed: int = 0
    lanes: tuple[tuple[int, float], ...] = ()

    @property
    def floats(self) -> int:
        """Numbers of x that a block reads, sums included."""
        return len(self.indices) + len(self.lanes)


@functools.cache
def row_order(kind: RowKind) -> RowOrder:
    """The order of x for a kind of weight."""
    if kind.name in _BY_WORDS:
        return _BY_WORDS[kind.name][0]
    return RowOrder(tuple(word * kind.ways + way for way in range(kind.ways) for word in range(kind.words)))


def row_block(vectors: Vectors, kind: RowKind, address: Any) -> RowBlock:
    """The block at an address."""
    if kind.name in _BY_WORDS:
        return _BY_WORDS[kind.name][1](BlockReader(vectors, address))
    if kind.ggml in CODED:
        return RowBlock(CODED[kind.ggml](BlockReader(vectors, address)))
    return RowBlock([RowGroup(planes(vectors, kind, address))])


def _q4_k(block: BlockReader) -> RowBlock:
    scales, groups = six_bits(block), []
    for half in (0, 1):
        words = block.words_of(16 + 64 * half)
        for upper in (0, 1):
            numbers = [block.vectors.nibbles(block.shifted(words, -8 * byte - 4 * upper)) for byte in range(4)]
            groups.append(RowGroup(numbers, _scales_of_parts(block, scales, half, upper)))
    return RowBlock(groups, scales)


def _q5_k(block: BlockReader) -> RowBlock:
    """Each of 32 bytes holds the fifth bits of eight numbers, one of each part."""
    scales, groups = six_bits(block), []
    fifths = block.words_of(16, 16)
    for half in (0, 1):
        words = block.words_of(48 + 64 * half)
        for upper in (0, 1):
            low = block.masked(words, 0x0F0F0F0F, shift=-4 * upper)
            shifts = [4 - 4 * half - upper - 2 * (lane // 8) for lane in range(LANES)]
            fifth = block.masked(block.shifted_each(fifths, shifts), 0x10101010)
            numbers = _offset_bytes(block, block.builder.or_(low, fifth))
            groups.append(RowGroup(numbers, _scales_of_parts(block, scales, half, upper)))
    return RowBlock(groups, scales)


def _scales_of_parts(block: BlockReader, scales: Any, half: int, upper: int) -> Any:
    return block.vectors.shuffled(scales, [4 * half + upper + 2 * (lane // 8) for lane in range(LANES)])


def _q6_k(block: BlockReader) -> RowBlock:
    vectors, builder, groups = block.vectors, block.builder, []
    scales = builder.fmul(block.signed(192), vectors.broadcast(block.scale(208)))
    low, high = [block.words_of(first, 64 + first) for first in (0, 32)], block.words_of(128)
    for quarter in range(4):
        four = block.masked(low[quarter % 2], 0x0F0F0F0F, shift=-4 * (quarter // 2))
        two = block.masked(high, 0x30303030, shift=4 - 2 * quarter)
        lanes = [8 * (lane // 8) + 2 * quarter + lane % 8 // 4 for lane in range(LANES)]
        groups.append(RowGroup(_offset_bytes(block, builder.or_(four, two)), vectors.shuffled(scales, lanes)))
    return RowBlock(groups, scales)


def _offset_bytes(block: BlockReader, words: Any) -> list[Any]:
    """The bytes of each word, which are below 64, plus 128: as bits of float32, without converting integers."""
    made = []
    for byte in range(4):
        bits = block.masked(words, _SIX_BITS, shift=16 - 8 * byte)
        whole = block.builder.or_(bits, block.vectors.all(block.vectors.int32, _OFFSET_BITS))
        made.append(block.builder.bitcast(whole, block.vectors.floats))
    return made


def _order_of_parts(offset: float) -> RowOrder:
    """Order for a block that yields the lower or upper halves of 64 bytes, one byte of each word at a time."""
    indices = tuple(
        _PART * (4 * half + upper + 2 * (lane // 8)) + 4 * (lane % 8) + byte
        for half in (0, 1)
        for upper in (0, 1)
        for byte in range(4)
        for lane in range(LANES)
    )
    return RowOrder(indices, _PART, tuple((part, factor) for factor in (-offset, 1.0) for part in range(_PARTS)))


_BY_WORDS: dict[str, tuple[RowOrder, Callable[[BlockReader], RowBlock]]] = {
    "q4_k": (_order_of_parts(0.0), _q4_k),
    "q5_k": (_order_of_parts(_OFFSET), _q5_k),
    "q6_k": (
        RowOrder(
            tuple(
                128 * (lane // 8) + 32 * quarter + 4 * (lane % 8) + byte
                for quarter in range(4)
                for byte in range(4)
                for lane in range(LANES)
            ),
            LANES,
            tuple((part, -_OFFSET - 32) for part in range(LANES)),  # whose numbers begin at -32
        ),
        _q6_k,
    ),
}
