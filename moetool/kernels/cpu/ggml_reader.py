"""ggml's blocks in memory, read by vectors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from moetool.kernels.cpu.vectors import LANES, Vectors


class RowGroup(NamedTuple):
    """Vectors of numbers whose products are added before they are scaled.

    Attributes:
        planes: vectors of float32.
        scale: scale of each lane of the sum; None if scales are stored outside the block or already applied.
    """

    planes: list[Any]
    scale: Any = None


class BlockReader:
    """A block in memory."""

    def __init__(self, vectors: Vectors, address: Any) -> None:
        self.vectors, self.builder, self._address = vectors, vectors.builder, address
        self._loaded: dict[int, Any] = {}

    def at(self, offset: int) -> Any:
        """The address of a byte."""
        return self.builder.add(self._address, self.vectors.number(offset))

    def bytes(self, offset: int) -> Any:
        """`LANES` bytes as int32, unsigned."""
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
        """The lower or upper half of `LANES` bytes, as int32 with undefined higher bits."""
        return self.shifted(self.bytes(offset), -4 * upper)

    def masked(self, words: Any, mask: int, shift: int = 0) -> Any:
        """Shift each int32 (see `shifted`), then mask it."""
        return self.builder.and_(self.shifted(words, shift), self.vectors.all(self.vectors.int32, mask))

    def shifted(self, words: Any, bits: int) -> Any:
        """Shift each int32 left, or right if `bits` is negative."""
        return self.shifted_each(words, [bits] * LANES) if bits else words

    def shifted_each(self, words: Any, bits: list[int]) -> Any:
        """Shift each int32 by its own number of bits, all left or all right."""
        shift = self.builder.shl if max(bits) > 0 else self.builder.lshr
        return shift(words, self.vectors.ir.Constant(words.type, [abs(each) for each in bits]))

    def words_of(self, offset: int, second: int | None = None) -> Any:
        """64 bytes as int32, or 32 from each of two offsets."""
        if second is None:
            return self.vectors.load(self.at(offset), self.vectors.words, 1)
        half = self.vectors.of(self.vectors.int32, LANES // 2)
        parts = [self.vectors.load(self.at(each), half, 1) for each in (offset, second)]
        every = self.vectors.ir.Constant(self.vectors.words, [*range(LANES)])
        return self.builder.shuffle_vector(*parts, every)

    def floats(self, words: Any, less: int = 0) -> Any:
        """Small int32 as float32, minus a constant."""
        if less:
            words = self.builder.sub(words, self.vectors.all(self.vectors.int32, less))
        return self.builder.sitofp(words, self.vectors.floats)

    def byte(self, offset: int) -> Any:
        """A byte as int64, unsigned."""
        return self.builder.zext(self.vectors.load(self.at(offset), self.vectors.int8, 1), self.vectors.int64)

    def short(self, offset: int) -> Any:
        """Two bytes as int64, unsigned."""
        return self.builder.zext(self.vectors.load(self.at(offset), self.vectors.int16, 1), self.vectors.int64)

    def spread(self, number: Any, bits: Sequence[int]) -> Any:
        """Copies of an integer in `LANES` int32, each shifted right by its own number of bits."""
        if number.type != self.vectors.int32:
            number = self.builder.zext(number, self.vectors.int32)
        shifts = self.vectors.ir.Constant(self.vectors.words, [*bits])
        return self.builder.lshr(self.vectors.broadcast(number), shifts)
