"""One stored expert: its tensors, their memory layout, and computation with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from moetool.kernels.cpu import many_rows
from moetool.kernels.cpu.int4 import KernelWeight
from moetool.kernels.cpu.scaled_weight import ScaledWeight, StackedWeight
from moetool.models.weights.format import STORED_DTYPES, Codec, Dense, Stored, StoredWeight, unpack
from moetool.models.weights.pack_quantized import PackCodec
from moetool.models.weights.packed import Block, PackedWeight


class LazyWeight(NamedTuple):
    """A weight kept as stored until it is used: blocks stacked by rows."""

    blocks: tuple[Stored, ...]
    codecs: tuple[Codec, ...]
    shapes: tuple[tuple[int, ...], ...]

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [O, I]."""
        parts = zip(self.codecs, self.blocks, self.shapes, strict=True)
        made = [unpack(codec, block, shape, dtype) for codec, block, shape in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the transposed weight [O, I], in the type of `x`."""
        return many_rows.linear(x, self.to(x.dtype))


Weight = torch.Tensor | PackedWeight | KernelWeight | ScaledWeight | StackedWeight | LazyWeight
"""A part of an expert, ready for computation."""


class Field(NamedTuple):
    """A tensor of an expert and its position in memory."""

    part: int
    block: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StoredLayout:
    """Memory layout of stored experts.

    Wide types come first, so that all tensors are aligned without padding. Within a type, a part's tensors of one role
    are adjacent.

    Attributes:
        codecs: codecs by part and block.
        shapes: unpacked shapes by part and block.
        fields: all tensors.
    """

    codecs: tuple[tuple[Codec, ...], ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    fields: tuple[Field, ...]

    @property
    def num_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields)

    @cached_property
    def packed(self) -> bool:
        """Whether every tensor is an unpacked weight, or packed as in `moetool.models.weights.packed`."""
        return all(isinstance(codec, Dense | PackCodec) for part in self.codecs for codec in part)

    def of_part(self, part: int, role: str) -> list[Field]:
        """Fields of a part with a role, block by block."""
        return [field for field in self.fields if (field.part, field.role) == (part, role)]

    def blocks(self, memory: torch.Tensor, part: int) -> tuple[Stored, ...]:
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.codecs[part]]
        for field in self.fields:
            if field.part == part:
                found[field.block][field.role] = field.of(memory)
        return tuple(found)

    def views(self, memory: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Weight, ...]:
        """Parts of an expert in memory, with these shapes."""
        return tuple(self._part(memory, part, shape) for part, shape in enumerate(shapes))

    def _part(self, memory: torch.Tensor, part: int, shape: tuple[int, ...]) -> Weight:
        codecs = self.codecs[part]
        plain = self.of_part(part, "weight")
        if len(plain) == len(codecs) and len({field.dtype for field in plain}) == 1:
            return _adjacent(memory, plain).view(shape)
        first = codecs[0]
        if not isinstance(first, PackCodec) or set(codecs) != {first}:
            return LazyWeight(self.blocks(memory, part), codecs, self.shapes[part])
        words, scale, zero = (self.of_part(part, role) for role in ("words", "scale", "zero"))
        # Adjacent tensors are unpacked together, unless zero points end inside a word between them.
        together = not zero or all(field.shape[0] * first.bits % 32 == 0 for field in words[:-1])
        cuts = [slice(None)] if together else [slice(i, i + 1) for i in range(len(words))]
        made = [
            Block(
                _adjacent(memory, words[cut]),
                _adjacent(memory, scale[cut]),
                _adjacent(memory, zero[cut]) if zero else None,
                first.columns,
            )
            for cut in cuts
        ]
        return PackedWeight(tuple(made), first.bits)


def _adjacent(memory: torch.Tensor, fields: Sequence[Field]) -> torch.Tensor:
    """View consecutive tensors in memory as one."""
    first = fields[0]
    flat = memory[first.offset : first.offset + sum(field.num_bytes for field in fields)]
    return flat.view(first.dtype).view(sum(field.shape[0] for field in fields), *first.shape[1:])


def layout_of(parts: Sequence[Sequence[StoredWeight]]) -> StoredLayout:
    """Layout of an expert with these weights, by part and block."""
    tensors = [
        (-STORED_DTYPES[tensor.dtype].itemsize, part, role, block, tensor)
        for part, weights in enumerate(parts)
        for block, weight in enumerate(weights)
        for role, tensor in weight.tensors.items()
    ]
    tensors.sort(key=lambda item: item[:4])
    fields, offset = [], 0
    for _, part, role, block, tensor in tensors:
        field = Field(part, block, role, tensor.shape, STORED_DTYPES[tensor.dtype], offset)
        fields.append(field)
        offset += field.num_bytes
    return StoredLayout(
        codecs=tuple(tuple(weight.codec for weight in weights) for weights in parts),
        shapes=tuple(tuple(weight.shape for weight in weights) for weights in parts),
        fields=tuple(fields),
    )


def rows_of(codec: Codec, shape: tuple[int, ...]) -> int:
    """Rows of a codec's output for a weight of this shape."""
    return shape[1] if codec.transposed else shape[0]


@dataclass(frozen=True, slots=True)
class DenseSlot:
    """A slot with an unpacked expert, its parts contiguous.

    Attributes:
        transposed: by part, whether it is stored transposed, for a faster product.
        dtype: data type of all parts.
    """

    shapes: tuple[tuple[int, ...], ...]
    transposed: tuple[bool, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        flat = slot[: self.num_bytes].view(self.dtype).split(sizes)
        return tuple(
            part.view(shape[::-1]).T if transposed else part.view(shape)
            for part, shape, transposed in zip(flat, self.shapes, self.transposed, strict=True)
        )

    def fill(self, layout: StoredLayout, stored: torch.Tensor, slot: torch.Tensor) -> None:
        """Unpack an expert from memory into a slot."""
        for part, view in enumerate(self.views(slot)):
            natural = view.T if self.transposed[part] else view
            row = 0
            blocks = zip(layout.codecs[part], layout.blocks(stored, part), layout.shapes[part], strict=True)
            for codec, block, shape in blocks:
                if codec.transposed != self.transposed[part]:
                    view.copy_(unpack(codec, block, shape, self.dtype))
                    continue
                rows = rows_of(codec, shape)
                codec.into(block, natural[row : row + rows])
                row += rows
