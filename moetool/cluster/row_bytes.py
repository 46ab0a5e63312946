"""Rows of hidden states as bytes, and back."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetool.errors import MoetoolError
from moetool.models.loading import DTYPES
from moetool.types import ModelSpec

_HEAD = struct.Struct("!IIB")  # layer, width, type
_TYPES = tuple(DTYPES.values())
_CODES = {dtype: code for code, dtype in enumerate(_TYPES)}


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of several experts of one layer.

    Attributes:
        layer: MoE layer, 0..L-1.
        counts: rows of each expert, in the order of `rows_RD`.
        rows_RD: the rows, one expert after the other.
    """

    layer: int
    counts: Mapping[int, int]
    rows_RD: torch.Tensor

    def by_expert(self) -> dict[int, torch.Tensor]:
        """Views of each expert's rows."""
        return dict(zip(self.counts, self.rows_RD.split(list(self.counts.values())), strict=True))


def rows_parts(layer: int, counts: Mapping[int, int], rows_RD: torch.Tensor) -> list[bytes | memoryview]:
    """Return the parts of a message with rows. Args: attributes of `ExpertRows`."""
    head = _HEAD.pack(layer, rows_RD.shape[1], _CODES[rows_RD.dtype])
    numbers = struct.pack(f"!{2 * len(counts)}I", *counts, *counts.values())
    return [head + numbers, rows_RD.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data]


def read_rows(parts: Sequence[Any], spec: ModelSpec) -> ExpertRows:
    """Read the parts of a message with rows; the rows share the memory of the last part.

    Raises:
        MoetoolError: they are malformed, or name experts or a width that the model does not have.
    """
    try:
        head, data = parts
        layer, width, code = _HEAD.unpack_from(head)
        numbers = struct.unpack_from(f"!{(len(head) - _HEAD.size) // 4}I", head, _HEAD.size)
        dtype, num = _TYPES[code], len(numbers) // 2
        counts = dict(zip(numbers[:num], numbers[num:], strict=True))
        num_rows = sum(counts.values())
        if len(counts) != num or 0 in counts.values() or layer >= spec.num_layers:
            raise ValueError
        if width != spec.hidden_size:  # compiled products trust it
            raise ValueError
        if (num and max(counts) >= spec.num_experts_L[layer]) or len(data) != num_rows * width * dtype.itemsize:
            raise ValueError
    except (ValueError, TypeError, IndexError, struct.error):
        raise MoetoolError("malformed rows of hidden states") from None
    rows_RD = torch.frombuffer(data, dtype=dtype).view(-1, width) if num else torch.empty(0, width, dtype=dtype)
    return ExpertRows(layer, counts, rows_RD)
