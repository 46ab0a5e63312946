"""Unpack the experts of several slots on their device, with a nearly constant number of operations."""

import torch

from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.stored_expert import Field, StoredLayout, rows_of
from moetool.models.weights.format import Dense
from moetool.models.weights.fp8_block import Fp8BlockCodec
from moetool.models.weights.mxfp4 import Mxfp4Codec
from moetool.models.weights.pack_quantized import PackCodec
from moetool.models.weights.scaled import ScaledCodec

_ROOM_BYTES = 2**27
"""Bytes for unpacked experts. Temporary memory is about three times as much."""
_MOST = 64  # experts unpacked together


class SlotUnpacking:
    """Memory for unpacked experts.

    Formats with row-wise tensors (compressed-tensors integers, FP8 by block, row or group, MXFP4) are gathered from all
    slots and unpacked as one tall weight; others slot by slot.

    Args:
        files: describes the content of slots.
        slots: all slots of a pool, one stride apart.
        dtype: data type of the unpacked weights.

    Attributes:
        capacity: experts unpacked together.
    """

    def __init__(self, files: ExpertFiles, slots: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._files = files
        self._slots = slots
        self._pool = pool_of(slots)
        self._sizes = [torch.Size(shape).numel() for shape in files.shapes]
        self.capacity = max(1, min(_MOST, len(slots), _ROOM_BYTES // (sum(self._sizes) * dtype.itemsize)))
        self._room = [torch.empty(self.capacity * size, dtype=dtype, device=slots[0].device) for size in self._sizes]

    def unpack(self, layer: int, slots: list[int]) -> tuple[torch.Tensor, ...]:
        """Parts [capacity, ...] of a layer's experts; the first ones are those in `slots`.

        Valid until the next call. Work queued before that call on the same stream still reads the old weights.
        """
        layout = self._files.stored_layout(self._files.spec.expert_key(layer, 0))
        index_A = torch.tensor(slots, dtype=torch.int64)
        if self._pool.device.type == "cuda":
            index_A = index_A.pin_memory().to(self._pool.device, non_blocking=True)
        made = []
        for part, (shape, room) in enumerate(zip(self._files.shapes, self._room, strict=True)):
            codecs = layout.codecs[part]
            transposed = all(codec.transposed for codec in codecs)
            natural = tuple(shape[::-1]) if transposed else tuple(shape)
            out_ANK = room.view(self.capacity, *natural)
            if is_by_rows(layout, part):
                self._unpack_rows(layout, part, index_A, out_ANK[: len(slots)])
            else:
                for index, slot in enumerate(slots):
                    self._unpack_one(layout, part, self._slots[slot], out_ANK[index])
            made.append(out_ANK.transpose(1, 2) if transposed else out_ANK)
        return tuple(made)

    def _unpack_rows(self, layout: StoredLayout, part: int, index_A: torch.Tensor, out_ANK: torch.Tensor) -> None:
        roles = dict.fromkeys(field.role for field in layout.fields if field.part == part)
        stored = {role: self._gathered(layout.of_part(part, role), index_A) for role in roles}
        layout.codecs[part][0].into(stored, out_ANK.flatten(0, 1))

    def _unpack_one(self, layout: StoredLayout, part: int, slot: torch.Tensor, out: torch.Tensor) -> None:
        row = 0
        blocks = zip(layout.codecs[part], layout.blocks(slot, part), layout.shapes[part], strict=True)
        for codec, block, shape in blocks:
            rows = rows_of(codec, shape)
            codec.into(block, out[row : row + rows])
            row += rows

    def _gathered(self, fields: list[Field], index_A: torch.Tensor) -> torch.Tensor:
        """Gather the adjacent tensors of one role from several slots, concatenated."""
        first, num_bytes = fields[0], sum(field.num_bytes for field in fields)
        bytes_S = self._pool[:, first.offset : first.offset + num_bytes]
        widest = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if num_bytes % dtype.itemsize == 0 and (first.offset + self._pool.storage_offset()) % dtype.itemsize == 0
        )
        taken = bytes_S.view(widest).index_select(0, index_A)
        return taken.view(first.dtype).reshape(-1, *first.shape[1:])


def pool_of(slots: list[torch.Tensor]) -> torch.Tensor:
    """One view uint8 [slots, bytes] of all slots of a pool, which are one stride apart."""
    stride = slots[1].data_ptr() - slots[0].data_ptr() if len(slots) > 1 else slots[0].numel()
    return slots[0].as_strided((len(slots), slots[0].numel()), (stride, 1))


def is_by_rows(layout: StoredLayout, part: int) -> bool:
    """Whether the concatenated tensors of a part form one tall weight."""
    codecs, shapes = layout.codecs[part], layout.shapes[part]
    first = codecs[0]
    if set(codecs) != {first} or not isinstance(first, Dense | PackCodec | Fp8BlockCodec | Mxfp4Codec | ScaledCodec):
        return False
    for field in layout.fields:
        if field.part != part:
            continue
        rows, shared = rows_of(codecs[field.block], shapes[field.block]), 1  # rows that share one of the field's
        if isinstance(first, Fp8BlockCodec | ScaledCodec) and field.role != "values":
            if isinstance(first, Fp8BlockCodec) and first.block is None:
                return False
            shared = first.block[0] if first.block else 1
        elif isinstance(first, PackCodec) and field.role == "zero":
            shared = 32 // first.bits
        if not field.shape or field.shape[0] * shared != rows:
            return False
    return True
