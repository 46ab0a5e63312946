"""Rows of hidden states as bytes, and back."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetool.base.errors import MoetoolError
from moetool.base.types import ModelSpec
from moetool.models.loading import DTYPES

_HEAD = struct.Struct("!IIIB")  # layer, width, experts, type
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


def rows_parts(
    layer: int, counts: Mapping[int, int], rows_UD: torch.Tensor, sources_R: Sequence[int] | None = None
) -> list[bytes | memoryview]:
    """Return the parts of a message with rows.

    Args:
        layer, counts: attributes of `ExpertRows`.
        rows_UD: its rows; with `sources_R`, the rows that it is made of.
        sources_R: place of each of its rows in `rows_UD`; None: these are its rows.
    """
    sources_R = sources_R or ()
    head = _HEAD.pack(layer, rows_UD.shape[1], len(counts), _CODES[rows_UD.dtype])
    numbers = struct.pack(f"!{2 * len(counts) + len(sources_R)}I", *counts, *counts.values(), *sources_R)
    return [head + numbers, rows_UD.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data]


def read_rows(parts: Sequence[Any], spec: ModelSpec) -> ExpertRows:
    """Read the parts of a message with rows; the rows share the memory of the last part unless some repeat.

    Raises:
        MoetoolError: they are malformed, or name experts or a width that the model does not have.
    """
    try:
        head, data = parts
        layer, width, num, code = _HEAD.unpack_from(head)
        numbers = struct.unpack_from(f"!{(len(head) - _HEAD.size) // 4}I", head, _HEAD.size)
        dtype, sources = _TYPES[code], numbers[2 * num :]
        counts = dict(zip(numbers[:num], numbers[num : 2 * num], strict=True))
        num_rows = num_pairs = sum(counts.values())
        if sources:
            num_rows = max(sources) + 1
            if len(sources) != num_pairs or num_pairs > num_rows * spec.top_k_L[layer]:  # bounds the memory of the rows
                raise ValueError
        if len(counts) != num or 0 in counts.values() or layer >= spec.num_layers:
            raise ValueError
        if width != spec.hidden_size:  # compiled products trust it
            raise ValueError
        if (num and max(counts) >= spec.num_experts_L[layer]) or len(data) != num_rows * width * dtype.itemsize:
            raise ValueError
    except (ValueError, TypeError, IndexError, struct.error):
        raise MoetoolError("malformed rows of hidden states") from None
    rows_RD = torch.frombuffer(data, dtype=dtype).view(-1, width) if num else torch.empty(0, width, dtype=dtype)
    return ExpertRows(layer, counts, rows_RD[list(sources)] if sources else rows_RD)
