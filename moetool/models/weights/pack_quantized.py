"""The weight format `pack-quantized` of compressed-tensors (layout and arithmetic: `moetool.models.weights.packed`)."""

from dataclasses import dataclass

import torch

from moetool.kernels.cpu import int4
from moetool.kernels.cpu.int4 import Grouping
from moetool.models.files.tensor_index import FLOATS, Tensor
from moetool.models.weights.format import Stored, StoredWeight, UnclaimedTensors, ceil_div
from moetool.models.weights.packed import PACKED, SCALE, SHAPE, ZERO, Block


@dataclass(frozen=True, slots=True)
class PackCodec:
    """(packed value - zero point) * scale, in the type of the scale.

    Attributes:
        columns: inputs; the last word of a row may hold more.
    """

    bits: int
    columns: int
    transposed: bool = False

    def block(self, stored: Stored) -> Block:
        """The tensors as `moetool.models.weights.packed` has them."""
        return Block(stored["words"], stored["scale"], stored.get("zero"), self.columns)

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        self.block(stored).into(out, self.bits)

    def arrange(self, stored: Stored, words: torch.Tensor, tile: int) -> Grouping:
        int4.arrange(stored["words"].view(torch.uint8), words.view(torch.uint8), tile)
        zero = self.block(stored).zero_points(self.bits)
        return Grouping(stored["scale"], None if zero is None else zero.view(torch.uint8) + 8, None)


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """The format.

    Attributes:
        bits: bits per value: 2, 4 or 8.
        group: inputs that share a scale; 0: a whole row.
        symmetric: whether there are no zero points.
    """

    bits: int
    group: int
    symmetric: bool

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def weight_of(self, tensor: str) -> str | None:
        return tensor.removesuffix("_packed") if tensor.endswith("." + PACKED) else None

    def claim(self, weight: str, unclaimed: UnclaimedTensors) -> StoredWeight | None:
        stem = weight.removesuffix("weight")
        words = unclaimed.get(stem + PACKED)
        assert words is not None
        if words.dtype == "U8":
            return None
        unclaimed.take(stem + PACKED)
        unclaimed.require_dtype(stem + PACKED, words, "I32")
        if len(words.shape) != 2:
            raise unclaimed.error(stem + PACKED, words, f"has shape {list(words.shape)}, expected a matrix")
        rows, columns = words.shape[0], words.shape[1] * 32 // self.bits
        scale = unclaimed.need(stem + SCALE, words, "the scales")
        unclaimed.require_dtype(stem + SCALE, scale, *FLOATS)
        if (record := unclaimed.take(stem + SHAPE)) is not None:
            columns = self._columns(stem, words, unclaimed.integers(stem + SHAPE, record), unclaimed)
        zero = unclaimed.take(stem + ZERO)
        group = self.group or columns
        if columns % group:
            raise unclaimed.error(
                stem + PACKED, words, f"holds {columns} inputs, expected a multiple of the config's group_size {group}"
            )
        why = f"for rows of {columns} inputs in groups of {group} by the config"
        unclaimed.require_shape(stem + SCALE, scale, (rows, columns // group), why)
        tensors = {"words": words, "scale": scale}
        if self.symmetric == (zero is not None):
            if zero is None:
                raise unclaimed.error(stem + PACKED, words, f"has no {ZERO}, expected it: the config is asymmetric")
            raise unclaimed.error(stem + ZERO, zero, "exists, expected none: the config is symmetric")
        if zero is not None:
            unclaimed.require_dtype(stem + ZERO, zero, "I32")
            unclaimed.require_shape(stem + ZERO, zero, (ceil_div(rows * self.bits, 32), columns // group), why)
            tensors = {"words": words, "zero": zero, "scale": scale}
        return StoredWeight(
            name=weight, shape=(rows, columns), tensors=tensors, codec=PackCodec(self.bits, columns), format=self.name
        )

    def _columns(self, stem: str, words: Tensor, shape: tuple[int, ...], unclaimed: UnclaimedTensors) -> int:
        """Number of inputs from the stored shape, which must match the words."""
        rows, wide = words.shape
        if len(shape) != 2 or shape[0] != rows or ceil_div(shape[1] * self.bits, 32) != wide:
            expected = f"[{shape[0]}, {ceil_div(shape[-1] * self.bits, 32)}]" if shape else "two numbers there"
            raise unclaimed.error(
                stem + PACKED,
                words,
                f"has shape {list(words.shape)}, and {stem}{SHAPE} says {list(shape)}, expected {expected} at "
                f"{self.bits} bits",
            )
        return shape[1]

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        groups = columns // self.group if self.group else 1
        zeros = 0 if self.symmetric else ceil_div(rows * self.bits, 32) * groups
        return 4 * (rows * ceil_div(columns * self.bits, 32) + zeros) + number_bytes * rows * groups
