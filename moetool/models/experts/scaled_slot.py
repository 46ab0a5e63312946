"""Slots with stored FP8, int8, MXFP4, NVFP4 or ggml experts, with scales in the kernels' form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from moetool.kernels.cpu import scaled_weight
from moetool.kernels.cpu.compiled import BLOCK_ROWS
from moetool.kernels.cpu.dots import SCALE_BYTES
from moetool.kernels.cpu.kinds import FP8, GGML_KINDS, INT8, MXFP4, NVFP4, NVFP4_DIVIDED, RowKind
from moetool.kernels.cpu.matmul import MIN_ELEMENTS
from moetool.kernels.cpu.scaled_weight import ScaledWeight, StackedWeight
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.experts.stored_expert import StoredLayout, Weight
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.weights import nvfp4
from moetool.models.weights.format import Codec, Stored, WeightFormat, unpack
from moetool.models.weights.fp8_block import Fp8Block, Fp8BlockCodec
from moetool.models.weights.mxfp4 import GROUP, Mxfp4Codec
from moetool.models.weights.nvfp4 import Nvfp4, Nvfp4Codec
from moetool.models.weights.scaled import Scaled, ScaledCodec
from moetool.models.weights.value_scaling import scale_values

_ALIGNMENT = 64
_GGML = {kind.ggml: kind for kind in GGML_KINDS}
_KINDS = {torch.float8_e4m3fn: FP8, torch.int8: INT8}


class _Segment(NamedTuple):
    """A part of an expert in a slot, or rows of a part whose kind differs from that of its other rows.

    Attributes:
        kind: kind of its numbers; None if they are unpacked, as biases are.
        shape: shape of the part; for kept numbers, [rows, columns] as stored.
        offset, scale_offset: positions in the slot.
        group, scale_rows: see `ScaledWeight`.
    """

    kind: RowKind | None
    shape: tuple[int, ...]
    offset: int
    scale_offset: int = 0
    group: int = 0
    scale_rows: int = 0
    scale_bytes: int = 0
    transposed: bool = False

    @property
    def value_bytes(self) -> int:
        assert self.kind is not None
        return self.kind.row_bytes(math.prod(self.shape))


@dataclass(frozen=True)
class ScaledSlot:
    """A slot that holds an expert as stored; tensors without a scale are unpacked.

    Args:
        shapes: shapes of the parts.
        dtype: data type of unpacked parts.
    """

    layout: StoredLayout
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @cached_property
    def _segments(self) -> tuple[tuple[_Segment, ...], ...]:
        offset, segments = 0, []
        for part, shape in enumerate(self.shapes):
            found = []
            for segment in _scaling_of(self.layout, part) or (_Segment(None, shape, 0),):
                segment = segment._replace(offset=offset)
                offset += math.prod(shape) * self.dtype.itemsize
                if segment.kind is not None:
                    segment = segment._replace(scale_offset=_aligned(segment.offset + segment.value_bytes))
                    offset = segment.scale_offset + segment.scale_bytes
                offset = _aligned(offset)
                found.append(segment)
            segments.append(tuple(found))
        return tuple(segments)

    @property
    def num_bytes(self) -> int:
        last = self._segments[-1][-1]
        if last.kind is None:
            return last.offset + math.prod(last.shape) * self.dtype.itemsize
        return last.scale_offset + last.scale_bytes

    def views(self, slot: torch.Tensor) -> tuple[Weight, ...]:
        return tuple(self._view(segments, slot) for segments in self._segments)

    def fill(self, layout: StoredLayout, stored: torch.Tensor, slot: torch.Tensor) -> None:
        """Write an expert from memory into a slot."""
        for part, segments in enumerate(self._segments):
            view, blocks = self._view(segments, slot), layout.blocks(stored, part)
            if isinstance(view, torch.Tensor):
                shapes = layout.shapes[part]
                made = [unpack(*each, self.dtype) for each in zip(layout.codecs[part], blocks, shapes, strict=True)]
                view.copy_((made[0] if len(made) == 1 else torch.cat(made)).view(view.shape))
                continue
            if ggml := _ggml_of(layout, part):
                if isinstance(view, StackedWeight):
                    all_rows = [each.values for each in view.parts]
                else:
                    all_rows = ggml[0].rows_of(view.values)
                tensors = [block[role] for codec, block in zip(ggml, blocks, strict=True) for role, _ in codec.kinds]
                for rows, tensor in zip(all_rows, tensors, strict=True):
                    rows.copy_(tensor.view(rows.shape))
                continue
            assert isinstance(view, ScaledWeight)
            fields = layout.of_part(part, "values")
            first, num_bytes = fields[0], sum(field.num_bytes for field in fields)
            view.values.flatten().copy_(stored[first.offset : first.offset + num_bytes])
            if view.kind.scales_a_block:
                _fill_byte_scales(view, blocks)
                continue
            scales = torch.cat([scale_values(block["scale"]).flatten() for block in blocks])
            view.scale.flatten().copy_(scales * view.kind.factor)
            if view.kind is FP8 and _has_nan(view.values):
                view.scale.fill_(torch.nan)  # the kernel reads NaN as a number

    def _view(self, segments: tuple[_Segment, ...], slot: torch.Tensor) -> torch.Tensor | ScaledWeight | StackedWeight:
        segment = segments[0]
        if segment.kind is None:
            end = segment.offset + math.prod(segment.shape) * self.dtype.itemsize
            return slot[segment.offset : end].view(self.dtype).view(segment.shape)
        weights = tuple(self._scaled(segment, slot) for segment in segments)
        return weights[0] if len(weights) == 1 else StackedWeight(weights)

    @staticmethod
    def _scaled(segment: _Segment, slot: torch.Tensor) -> ScaledWeight:
        assert segment.kind is not None
        rows, columns = segment.shape
        values = slot[segment.offset : segment.offset + segment.value_bytes].view(rows, -1)
        scale = slot[segment.scale_offset :][: segment.scale_bytes]
        if segment.kind.scale == "float32":
            scale = scale.view(torch.float32)
        return ScaledWeight(segment.kind, values, scale, columns, segment.group, segment.scale_rows, segment.transposed)


def scaled_slot(layout: StoredLayout, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> ScaledSlot | None:
    """The slot for experts whose stored matrices the kernels multiply; None if they multiply none."""
    if dtype != torch.bfloat16 or not any(_scaling_of(layout, part) for part in range(len(shapes))):
        return None
    return ScaledSlot(layout, shapes, dtype)


def stays_scaled(format: WeightFormat, form: ExpertForm, dtype: torch.dtype, declared: torch.dtype) -> bool:
    """Whether slots hold experts of this format as stored, by the config, when computed in `dtype`.

    Args:
        declared: the model's data type, used for scales unless the format fixes theirs.
    """
    shapes = [part.shape for part in form.parts if len(part.shape) == 2]
    if dtype != torch.bfloat16 or len(shapes) != 2 or any(math.prod(shape) < MIN_ELEMENTS for shape in shapes):
        return False
    if form.up_transposed and isinstance(format, Scaled) and format.strategy == "channel":
        return False  # its scales belong to columns
    if form.up_transposed and format.name == "mxfp4":
        shapes = [shape[::-1] for shape in shapes]
    (rows, columns), down = shapes
    count = 2 if rows == 2 * down[1] else 1  # gate and up are separate matrices
    takes = partial(takes_scaled, format, declared=declared)
    return rows % count == 0 and takes(rows // count, columns) and takes(*down)


def takes_scaled(format: WeightFormat, rows: int, columns: int, declared: torch.dtype) -> bool:
    """Whether the kernels multiply a matrix [rows, columns] of this format as stored, by the config.

    Args:
        declared: as for `stays_scaled`.
    """
    if format.name == "mxfp4":
        kind, group, shared = MXFP4, GROUP, 1
    elif isinstance(format, Nvfp4):
        kind, group, shared = NVFP4_DIVIDED, nvfp4.GROUP, 1
    elif isinstance(format, Fp8Block | Scaled):
        if isinstance(format, Fp8Block) and format.four_bits:
            return False
        if isinstance(format, Scaled) and (not format.symmetric or declared == torch.float16):
            return False
        shared, group = format.block or (1, columns)
        kind = FP8
    else:
        return False
    return scaled_weight.multiplies(kind, columns, group) and rows % math.lcm(BLOCK_ROWS, shared) == 0


def _scaling_of(layout: StoredLayout, part: int) -> tuple[_Segment, ...]:
    """Numbers and scales of a part for the kernels, by kind; empty if they do not multiply all of it."""
    if ggml := _ggml_of(layout, part):
        found = [_blocks_of(codec, shape) for codec, shape in zip(ggml, layout.shapes[part], strict=True)]
        if len(found) > 1 and not all(len(segments) == 1 and not segments[0].transposed for segments in found):
            return ()
        return tuple(chain.from_iterable(found))
    segment = _scales_of(layout, part)
    return () if segment is None else (segment,)


def _ggml_of(layout: StoredLayout, part: int) -> list[GgmlCodec]:
    """Codecs of the blocks of a part in a GGUF file; empty if one has another format."""
    codecs = layout.codecs[part]
    ggml = [codec for codec in codecs if isinstance(codec, GgmlCodec)]
    return ggml if len(ggml) == len(codecs) else []


def _scales_of(layout: StoredLayout, part: int) -> _Segment | None:
    """Scales of a part, for the kernel; its blocks are concatenated."""
    codecs, shapes = layout.codecs[part], layout.shapes[part]
    values, scales = layout.of_part(part, "values"), layout.of_part(part, "scale")
    roles = {field.role for field in layout.fields if field.part == part}
    whole = {"whole"} if isinstance(codecs[0], Nvfp4Codec) else set()
    if roles != {"values", "scale"} | whole or len(set(codecs)) != 1 or len({shape[-1] for shape in shapes}) != 1:
        return None
    codec: Codec = codecs[0]
    transposed = codec.transposed
    sizes = [tuple(shape[::-1]) if transposed else tuple(shape) for shape in shapes]
    if any(len(size) != 2 for size in sizes) or (transposed and len(sizes) > 1):
        return None
    rows, columns = sum(size[0] for size in sizes), sizes[0][1]
    if rows * columns < MIN_ELEMENTS or any(size[0] % BLOCK_ROWS for size in sizes):
        return None
    if isinstance(codec, Mxfp4Codec):
        segment = _byte_scaled(MXFP4, (rows, columns), GROUP, transposed)
    elif isinstance(codec, Nvfp4Codec):
        segment = _byte_scaled(NVFP4_DIVIDED if codec.divides else NVFP4, (rows, columns), nvfp4.GROUP, transposed)
    elif isinstance(codec, Fp8BlockCodec | ScaledCodec):
        kind = _KINDS.get(values[0].dtype) if len({field.dtype for field in values}) == 1 else None
        if kind is None or (isinstance(codec, Fp8BlockCodec) and kind is INT8):
            return None
        if isinstance(codec, ScaledCodec) and any(field.dtype == torch.float16 for field in scales):
            return None  # its library rounds such weights to float16 first; the kernels do not
        shared_by = {
            codec.block or _shared_by(field.shape, size[0], columns) for field, size in zip(scales, sizes, strict=True)
        }
        if len(shared_by) != 1 or (block := shared_by.pop()) is None:
            return None
        shared, group = block
        if columns % group or any(size[0] % shared for size in sizes):
            return None
        numbers = [math.prod(field.shape) for field in scales]
        if any(number != size[0] // shared * (columns // group) for number, size in zip(numbers, sizes, strict=True)):
            return None
        segment = _Segment(kind, (rows, columns), 0, 0, group, shared, 4 * sum(numbers), transposed)
    else:
        return None
    assert segment.kind is not None
    return segment if scaled_weight.multiplies(segment.kind, columns, segment.group) else None


def _byte_scaled(kind: RowKind, shape: tuple[int, int], group: int, transposed: bool) -> _Segment:
    """A part with one-byte scales, padded because a kernel reads beyond those of the last row."""
    num_bytes = shape[0] * scaled_weight.scale_bytes(kind, shape[1], group) + kind.scales_a_block
    return _Segment(kind, shape, 0, 0, group, 1, num_bytes, transposed)


def _fill_byte_scales(view: ScaledWeight, blocks: Sequence[Stored]) -> None:
    scales = torch.cat([block["scale"].flatten(end_dim=-2).view(torch.uint8) for block in blocks])
    width = scaled_weight.scale_bytes(view.kind, view.columns, view.group)
    rows_OS = view.scale[: len(view.values) * width].view(len(view.values), width)
    view.scale[rows_OS.numel() :] = 0
    if view.kind.scale == "exponent":
        rows_OS.copy_(scales.view(rows_OS.shape))
        return
    rows_OS[:, SCALE_BYTES:] = scales
    whole = torch.cat([block["whole"].reshape(1).expand(len(block["scale"])) for block in blocks])
    rows_OS.view(torch.float32)[:, 0] = torch.nan if _has_nan(scales) else whole * view.kind.factor


def _blocks_of(codec: GgmlCodec, shape: tuple[int, ...]) -> tuple[_Segment, ...]:
    """ggml blocks, which contain their scales: a matrix, or a matrix for each tensor if their types differ."""
    kinds = [_GGML[kind] for _, kind in codec.kinds if kind in _GGML]
    if len(kinds) < len(codec.kinds) or codec.undo is not None or len(shape) != 2:
        return ()
    rows, columns = shape[::-1] if codec.transposed else shape
    if len(set(kinds)) == 1:
        kinds = kinds[:1]
    elif codec.interleaved or codec.transposed:
        return ()
    rows //= len(kinds)
    if rows * columns < MIN_ELEMENTS or rows % BLOCK_ROWS:
        return ()
    if not all(scaled_weight.multiplies(kind, columns, kind.numbers) for kind in kinds):
        return ()
    return tuple(
        _Segment(kind, (rows, columns), 0, group=kind.numbers, scale_rows=1, transposed=codec.transposed)
        for kind in kinds
    )


def _shared_by(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, int] | None:
    """Rows and columns that share a scale if scales of this shape are broadcast over a weight [rows, columns].

    None for shapes that the kernels do not support, such as [1, columns]: one scale per column.
    """
    if shape in ((), (1,), (1, 1)):
        return rows, columns
    if shape == (rows,):
        return 1, columns
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
        return 1, columns // shape[1]
    return None


def _has_nan(values: torch.Tensor) -> bool:
    """Whether a byte is FP8's NaN: 0x7F or 0xFF."""
    numbers = values.numpy()  # numpy's maxima are faster than torch's
    return bool(numbers.view(np.int8).max() == 0x7F or numbers.max() == 0xFF)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
