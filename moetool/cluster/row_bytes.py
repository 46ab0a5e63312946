"""Rows of hidden states as bytes, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moetool.errors import MoetoolError
from moetool.models.loading import DTYPES
from moetool.types import ModelSpec

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def rows_head(layer: int, rows: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """Header of `rows_bytes`: rows of each expert, their type and width.

    Args:
        layer: MoE layer, 0..L-1.
        rows: by expert [R, D]; at least one expert, all of one type and width.
    """
    some = next(iter(rows.values()))
    return {
        "layer": layer,
        "experts": list(rows),
        "rows": [len(x) for x in rows.values()],
        "dtype": _NAMES[some.dtype],
        "width": some.shape[1],
    }


def rows_bytes(rows: Mapping[int, torch.Tensor]) -> memoryview:
    """Return all rows as bytes, one expert after the other."""
    every = torch.cat(list(rows.values())).to("cpu").contiguous()
    return every.view(-1).view(torch.uint8).numpy().data


def read_rows(head: Mapping[str, Any], parts: Sequence[Any], spec: ModelSpec) -> dict[int, torch.Tensor]:
    """Read the rows of a message, by expert; each expert's rows in its own memory, aligned as torch allocates.

    Kernels are chosen by alignment, and another kernel may add in another order.

    Raises:
        MoetoolError: the header is malformed, or names experts that the model does not have.
    """
    try:
        layer, experts, counts = head["layer"], head["experts"], head["rows"]
        dtype, width = DTYPES[head["dtype"]], head["width"]
        numbers = [layer, width, *experts, *counts]
        whole = all(type(number) is int and number >= 0 for number in numbers) and len(experts) == len(counts)
        if not whole or layer >= spec.num_layers or len(set(experts)) != len(experts) or width == 0:
            raise ValueError
        if any(expert >= spec.num_experts_L[layer] for expert in experts) or 0 in counts:
            raise ValueError
        if not experts:
            return {}
        if len(parts) != 1 or len(parts[0]) != sum(counts) * width * dtype.itemsize:
            raise ValueError
    except (KeyError, ValueError, TypeError):
        raise MoetoolError("malformed rows of hidden states") from None
    every = torch.frombuffer(parts[0], dtype=dtype).view(-1, width)
    return {expert: rows.clone() for expert, rows in zip(experts, every.split(counts), strict=True)}
