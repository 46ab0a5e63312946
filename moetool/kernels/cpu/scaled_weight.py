"""8-bit and 4-bit weights kept as stored, with scales."""

import functools
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moetool.kernels.cpu import many_rows
from moetool.kernels.cpu.blocks import paired, row_order
from moetool.kernels.cpu.compiled import BLOCK_ROWS, RowKernel, find_kernel
from moetool.kernels.cpu.dots import SCALE_BYTES, RowJob, RowShape
from moetool.kernels.cpu.kinds import FP8, INT8, RowKind
from moetool.kernels.cpu.vectors import LANES

MOST_UNPACKED = 2**24
"""Approximate number of unpacked values in memory at a time; experts have fewer."""
_scratch = threading.local()


class ScaledWeight(NamedTuple):
    """A stored weight [O, I] in CPU memory, with its scales.

    Products multiply numbers by scales in float32: no weight is rounded to bfloat16. For many rows it is faster to
    unpack the weight first; it is then rounded like an unpacked weight.

    Attributes:
        values: uint8 [O, bytes of a row].
        scale: float32 [S, G] times the kind's factor, or uint8, padded with zeros: [O * G] exponents, or [O * (4 + G)],
            a row's float32 times the kind's factor before its FP8 numbers; empty if blocks contain their scales.
        columns: I.
        group: columns that share a scale.
        scale_rows: rows that share a row of scales.
        transposed: whether the weight is the transpose [I, O].
    """

    kind: RowKind
    values: torch.Tensor
    scale: torch.Tensor
    columns: int
    group: int
    scale_rows: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]."""
        return len(self.values), self.columns

    @property
    def row_shape(self) -> RowShape:
        """The sizes that its kernel is called with."""
        outputs, row_bytes = self.values.shape
        return _row_shape(self.kind, outputs, self.columns, self.group, self.scale_rows, row_bytes)

    def multiplied(self, dtype: torch.dtype) -> tuple[RowKind, RowShape]:
        """The kind and the sizes by which a kernel multiplies it with few rows of this type."""
        kind = paired(self.kind) if dtype == torch.bfloat16 else self.kind
        return kind, self._replace(kind=kind).row_shape

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, rounded to bfloat16."""
        dense = self._unpacked(torch.empty(self.shape, dtype=torch.bfloat16)).to(dtype)
        return dense.T if self.transposed else dense

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the transpose of [O, I], in the type of `x`; the memory for unpacking is reused."""
        size = unpacked_at_once(self.values.shape[0] * self.columns)
        shared = math.lcm(BLOCK_ROWS, self.scale_rows if self.scale_rows < len(self.values) else 1)
        step = max(1, size // self.columns // shared) * shared
        if step < len(self.values):
            return torch.cat([part.times(x) for part in self._parts(step)], dim=1)
        size = self.values.shape[0] * self.columns
        memory: torch.Tensor | None = getattr(_scratch, "memory", None)
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):
                memory = _scratch.memory = torch.empty(size, dtype=torch.bfloat16)
        dense = self._unpacked(memory[:size].view(self.shape))
        return many_rows.linear(x, dense.to(x.dtype))

    def _parts(self, step: int) -> "Iterator[ScaledWeight]":
        """Yield this number of rows at a time; each part begins with a row of scales, or all share one."""
        for first in range(0, len(self.values), step):
            skipped = first // self.scale_rows * scale_bytes(self.kind, self.columns, self.group)
            scale = self.scale.view(-1)[skipped // self.scale.itemsize :]
            yield self._replace(values=self.values[first : first + step], scale=scale)

    def _unpacked(self, out: torch.Tensor) -> torch.Tensor:
        kernel = kernel_of(self.kind)
        assert kernel.unpack is not None
        head = RowJob(next_task=0, x=0, output=out.data_ptr(), narrow=1, ahead=0, weights=1) + self.row_shape
        kernel.unpack([*head, self.values.data_ptr(), self.scale.data_ptr()], torch.get_num_threads())
        return out


class StackedWeight(NamedTuple):
    """A stored weight [O, I] that concatenates the rows of several weights of different kinds.

    Attributes:
        parts: the weights, none of them transposed.
    """

    parts: tuple[ScaledWeight, ...]

    @property
    def transposed(self) -> bool:
        """Always False."""
        return False

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].columns

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, rounded to bfloat16."""
        return torch.cat([part.to(dtype) for part in self.parts])

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the transpose of [O, I], in the type of `x`."""
        return torch.cat([part.times(x) for part in self.parts], dim=1)


@functools.lru_cache(maxsize=1024)
def _row_shape(kind: RowKind, outputs: int, columns: int, group: int, scale_rows: int, row_bytes: int) -> RowShape:
    vectors = -(-columns // kind.numbers)
    groups = 1
    if kind.has_scales:
        groups = vectors if kind.scales_a_block else -(-columns // group)
    return RowShape(
        outputs=outputs,
        x_bytes=vectors * row_order(kind).num_bytes,
        row_bytes=row_bytes,
        groups=groups,
        vectors=vectors // groups,
        scale_rows=scale_rows,
        scale_bytes=scale_bytes(kind, columns, group) if kind.has_scales else 0,
    )


def scale_bytes(kind: RowKind, columns: int, group: int) -> int:
    if not kind.scales_a_block:
        return 4 * (columns // group)
    return columns // group + (SCALE_BYTES if kind.scale == "float8" else 0)


def unpacked_at_once(numbers: int) -> int:
    """Approximate number of a weight's values in memory unpacked while it is multiplied."""
    return min(numbers, MOST_UNPACKED)


def kernel_of(kind: RowKind) -> RowKernel:
    """The kernel of a kind of which a weight exists."""
    kernel = find_kernel(kind)
    assert kernel is not None, "a weight is kept as stored only if a kernel exists"
    return kernel


def multiplies(kind: RowKind, columns: int, group: int) -> bool:
    """Whether the kernel supports rows of this length with this number of values per scale."""
    if find_kernel(paired(kind)) is None:
        return False
    if kind.ggml is not None:
        return columns % kind.numbers == 0
    if kind.scales_a_block:
        return group * kind.scales_a_block == kind.numbers and columns % (4 * LANES) == 0
    return kind in (FP8, INT8) and group % kind.numbers == 0 and columns % group == 0
