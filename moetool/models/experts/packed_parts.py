"""Parts of packed experts in slots, described for a kernel that multiplies without unpacking."""

import torch

from moetool.kernels.packed_part import WIDEST, PackedPart, Values
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.experts.slot_unpacking import is_by_rows, pool_of
from moetool.models.experts.stored_expert import StoredLayout, rows_of
from moetool.models.files.tensor_index import FLOATS
from moetool.models.weights.format import Dense
from moetool.models.weights.fp8_block import Fp8BlockCodec
from moetool.models.weights.mxfp4 import GROUP, Mxfp4Codec
from moetool.models.weights.pack_quantized import PackCodec
from moetool.models.weights.scaled import ScaledCodec


def packed_parts(
    files: ExpertFiles, layer: int, form: ExpertForm, slots: list[torch.Tensor]
) -> tuple[torch.Tensor | PackedPart, ...] | None:
    """Parts of a layer's experts, [slots, ...]; None if the kernel does not support the format of a part.

    It supports int4 and int8 of compressed-tensors without zero points, FP8 and int8 with scales by block, row or
    group, and MXFP4.

    Args:
        slots: all slots of a pool, one stride apart.
    """
    layout = files.stored_layout(files.spec.expert_key(layer, 0))
    pool_SB = pool_of(slots)
    second, found = len(files.shapes) // 2, []
    for number, shape in enumerate(files.shapes):
        transposed = {0: form.up_transposed, second: form.down_transposed}.get(number, False)
        part = _part(layout, number, tuple(shape), pool_SB, transposed)
        if part is None:
            return None
        found.append(part)
    return tuple(found)


def _part(
    layout: StoredLayout, number: int, shape: tuple[int, ...], pool_SB: torch.Tensor, transposed: bool
) -> torch.Tensor | PackedPart | None:
    if not is_by_rows(layout, number):
        return None
    codec = layout.codecs[number][0]
    fields = {field.role: field for field in reversed(layout.fields) if field.part == number}
    if isinstance(codec, Dense):
        field = fields["weight"]
        flat = pool_SB[:, field.offset : field.offset + torch.Size(shape).numel() * field.dtype.itemsize]
        return flat.view(field.dtype).unflatten(1, shape)
    if codec.transposed != transposed or "zero" in fields or len(shape) != 2:
        return None
    outputs = sum(rows_of(codec, block) for block in layout.shapes[number])
    inputs = shape[0] * shape[1] // outputs
    values, scale = fields["words" if isinstance(codec, PackCodec) else "values"], fields["scale"]
    if (kind := _values(codec, values.dtype)) is None:
        return None
    row_bytes = values.num_bytes // values.shape[0]
    groups = scale.num_bytes // scale.dtype.itemsize // scale.shape[0]
    block = (1, inputs // groups)
    if isinstance(codec, Fp8BlockCodec | ScaledCodec) and codec.block is not None:
        block = codec.block
    elif isinstance(codec, Mxfp4Codec):
        block = (1, GROUP)
    if not _splits(block[1], inputs):
        return None
    own = scale.dtype if isinstance(codec, PackCodec | ScaledCodec) and scale.dtype in FLOATS.values() else None
    scale_dtype = torch.uint8 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    return PackedPart(
        values_SB=pool_SB[:, values.offset :].view(torch.uint8),
        scale_SG=_from(pool_SB, scale.offset, scale_dtype),
        values=kind,
        rounded=own or torch.float32,
        shape=(len(pool_SB), outputs, inputs),
        row_bytes=row_bytes,
        block=block,
    )


def _values(codec: object, dtype: torch.dtype) -> Values | None:
    if isinstance(codec, PackCodec):
        return {4: Values.BIASED4, 8: Values.BIASED8}.get(codec.bits)
    if isinstance(codec, Mxfp4Codec) or (isinstance(codec, Fp8BlockCodec) and dtype == torch.int8):
        return Values.E2M1
    return {torch.float8_e4m3fn: Values.E4M3, torch.int8: Values.INT8}.get(dtype)


def _splits(group: int, inputs: int) -> bool:
    """Whether a kernel step's inputs hold whole groups, or are part of one."""
    if group >= inputs:
        return True
    return group % WIDEST == 0 if group > WIDEST else group & (group - 1) == 0


def _from(pool_SB: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """View each slot from a byte on as numbers, without an incomplete last one."""
    end = offset + (pool_SB.shape[1] - offset) // dtype.itemsize * dtype.itemsize
    return pool_SB[:, offset:end].view(dtype)
