"""Unpacking of low-bit values: bytes to numbers, and numbers times the scale of their group."""

from collections.abc import Callable

import torch

CHUNK = 2**19
"""Numbers unpacked at a time."""


def dense(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of values int8 [..., O, I] in the type of its scales [..., O, I / group]."""
    out = torch.empty(values.shape, dtype=scale.dtype, device=values.device)
    _dense_into(out, values, scale, zero)
    return out


def write_dense(
    out: torch.Tensor,
    values: Callable[[slice], torch.Tensor],
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    multiple: int = 1,
) -> None:
    """Write a weight [O, I], rounded to the type of its scales, a few rows at a time.

    Args:
        values: returns the int8 values of rows.
        scale, zero: [O, I / group].
        multiple: number of rows that must be requested together.
    """
    # A few rows stay in the CPU cache between steps. On a GPU each call costs a launch.
    rows = max(1, CHUNK // (out.shape[1] * multiple)) * multiple if out.device.type == "cpu" else max(1, len(out))
    for first in range(0, len(out), rows):
        part = slice(first, first + rows)
        mine = None if zero is None else zero[part]
        if out.dtype == scale.dtype:
            _dense_into(out[part], values(part), scale[part], mine)
        else:
            out[part] = dense(values(part), scale[part], mine)


def _dense_into(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
    """Write the weight to `out`, computing every step in the type of the scales."""
    grouped = out.copy_(values).unflatten(-1, (scale.shape[-1], -1))
    if zero is not None:
        grouped -= zero[..., None].to(scale.dtype)
    grouped *= scale[..., None]


def unpack_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Values int8 [..., O, I] of bytes [..., O, I / 2]: widen each byte, then shift its upper half.

    Unlike interleaving the halves, all steps use whole vectors, and all but one work in place.
    """
    wide = pairs.to(torch.int16)
    wide |= wide << 4
    wide &= 0x0F0F
    values = wide.view(torch.uint8)
    values -= 8  # wraps around
    return values.view(torch.int8)
