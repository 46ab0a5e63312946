"""Slots that hold 4-bit experts in the order of `moetool.kernels.cpu.int4`."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from moetool.kernels.cpu import int4
from moetool.kernels.cpu.int4 import Grouping, KernelBlock, KernelWeight
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.experts.stored_expert import StoredLayout
from moetool.models.weights.awq import Awq
from moetool.models.weights.format import Stored, WeightFormat
from moetool.models.weights.gptq import Gptq
from moetool.models.weights.pack_quantized import PackQuantized


@runtime_checkable
class FourBitCodec(Protocol):
    """A codec whose 4-bit values can stay packed."""

    @property
    def bits(self) -> int: ...

    def arrange(self, stored: Stored, words: torch.Tensor, tile: int) -> Grouping:
        """Write the values to words int32 [O, I / 8] in tiles of this number of rows; returns their groups.

        Raises:
            ValueError: its groups differ in size.
        """


class _Run(NamedTuple):
    """Blocks of a part that one product computes, with their position in a slot.

    Attributes:
        blocks: range of blocks of the part.
        offset: position in the slot.
        scale: data type of the scales if they are kept besides the kernel's.
    """

    blocks: tuple[int, ...]
    offset: int
    rows: int
    columns: int
    groups: int
    scale: torch.dtype | None
    has_zero: bool
    ordered: bool

    @property
    def num_bytes(self) -> int:
        scales, each = self.rows * self.groups, 4 + (self.scale.itemsize if self.scale else 0) + self.has_zero
        return self.rows * self.columns // 2 + scales * each + 4 * self.columns * self.ordered

    def of(self, slot: torch.Tensor, tile: int) -> KernelBlock:
        at = self.offset

        def next_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + torch.Size(shape).numel() * dtype.itemsize
            return slot[begin:at].view(dtype).view(shape)

        return KernelBlock(
            words=next_of(torch.int32, self.rows, self.columns // 8),
            pairs_GO2=next_of(torch.bfloat16, self.groups, self.rows, 2),
            order=next_of(torch.int32, self.columns) if self.ordered else None,
            scale=next_of(self.scale, self.rows, self.groups) if self.scale else None,
            zero=next_of(torch.uint8, self.rows, self.groups) if self.has_zero else None,
            tile=tile,
        )


@dataclass(frozen=True)
class PackedSlot:
    """A slot with a packed expert: for each part the values, scales and other data of the weight.

    Args:
        tile: rows of a tile of the kernel.
    """

    layout: StoredLayout
    tile: int

    @cached_property
    def _runs(self) -> tuple[tuple[_Run, ...], ...]:
        offset, parts = 0, []
        for part in range(len(self.layout.codecs)):
            runs: list[_Run] = []
            for block in range(len(self.layout.codecs[part])):
                run = self._run(part, block, offset)
                last = runs[-1] if runs else None
                if last is not None and not run.ordered and run[3:] == last[3:]:
                    runs[-1] = last._replace(blocks=(*last.blocks, block), rows=last.rows + run.rows)
                else:
                    runs.append(run)
                offset = runs[-1].offset + runs[-1].num_bytes
            parts.append(tuple(runs))
        return tuple(parts)

    def _run(self, part: int, block: int, offset: int) -> _Run:
        rows, columns = self.layout.shapes[part][block]
        fields = {f.role: f for f in self.layout.fields if (f.part, f.block) == (part, block)}
        scale = fields["scale"]
        return _Run(
            blocks=(block,),
            offset=offset,
            rows=rows,
            columns=columns,
            groups=torch.Size(scale.shape).numel() // rows,
            scale=None if scale.dtype == torch.bfloat16 else scale.dtype,
            has_zero="zero" in fields,
            ordered="order" in fields,
        )

    @property
    def num_bytes(self) -> int:
        last = self._runs[-1][-1]
        return last.offset + last.num_bytes

    def views(self, slot: torch.Tensor) -> tuple[KernelWeight, ...]:
        return tuple(KernelWeight(tuple(run.of(slot, self.tile) for run in runs)) for runs in self._runs)

    def fill(self, layout: StoredLayout, stored: torch.Tensor, slot: torch.Tensor) -> None:
        """Write an expert from memory into a slot. Raises: ValueError: a weight's groups differ in size."""
        for part, runs in enumerate(self._runs):
            blocks = layout.blocks(stored, part)
            for run in runs:
                whole, row = run.of(slot, self.tile), 0
                for block in run.blocks:
                    rows = slice(row, row + layout.shapes[part][block][0])
                    codec = layout.codecs[part][block]
                    assert isinstance(codec, FourBitCodec)
                    scale, zero, order = codec.arrange(blocks[block], whole.words[rows], self.tile)
                    whole.pairs_GO2[:, rows] = int4.pairs(scale, zero)
                    for kept, made in ((whole.scale, scale), (whole.zero, zero)):
                        if kept is not None and made is not None:
                            kept[rows] = made
                    if whole.order is not None and order is not None:
                        whole.order.copy_(order)
                    row = rows.stop


def packed_slot(layout: StoredLayout) -> PackedSlot | None:
    """The slot for experts that the kernel multiplies; None if it multiplies only some of their weights."""
    for part, codecs in enumerate(layout.codecs):
        scales = layout.of_part(part, "scale")
        for codec, shape, scale in zip(codecs, layout.shapes[part], scales, strict=False):
            if not isinstance(codec, FourBitCodec) or codec.bits != 4:
                return None
            rows, columns = shape
            if not int4.multiplies(rows, columns, torch.Size(scale.shape).numel() // rows):
                return None
        if len(scales) != len(codecs):
            return None
    return PackedSlot(layout, int4.tile_rows())


def stays_packed(format: WeightFormat, form: ExpertForm, dtype: torch.dtype) -> bool:
    """Whether slots hold experts of this format packed, by the config, when computed in `dtype`."""
    if isinstance(format, PackQuantized):
        return True
    if dtype != torch.bfloat16:
        return False
    return all(len(part.shape) == 2 and takes_packed(format, *part.shape) for part in form.parts)


def takes_packed(format: WeightFormat, rows: int, columns: int) -> bool:
    """Whether the kernel multiplies a matrix [rows, columns] of this format packed, by the config."""
    if not isinstance(format, Gptq | Awq | PackQuantized) or getattr(format, "bits", 4) != 4:
        return False
    return format.group > 0 and int4.multiplies(rows, columns, columns // format.group)


def packed_bytes(format: WeightFormat, rows: int, columns: int, declared: torch.dtype) -> int:
    """Bytes in a slot of a matrix that `takes_packed` accepts, by the config.

    Args:
        declared: the model's data type, used for scales unless the format fixes theirs.
    """
    assert isinstance(format, Gptq | Awq | PackQuantized)
    each, order = 4 + torch.float16.itemsize + 1, 0  # the kernel's two numbers, the scale, the zero point
    if isinstance(format, PackQuantized):
        each = 4 + (declared != torch.bfloat16) * declared.itemsize + (not format.symmetric)
    elif isinstance(format, Gptq):
        order = 4 * columns
    return rows * columns // 2 + rows * (columns // format.group) * each + order
