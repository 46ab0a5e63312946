"""Arithmetic of weight formats: low-bit values as numbers, and numbers times their group's scale.

On a CPU, tables of value pairs convert values to numbers faster than torch does.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CHUNK = 2**16
"""Numbers unpacked at a time, so that they stay in the CPU cache between steps."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def _eight_bits(dtype: torch.dtype) -> Any:
    """Both values of every pair of bytes, indexed by the pair as a 16-bit number."""
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(dtype)
    return pairs.to(torch.float32).view(torch.int64).numpy()


@functools.cache
def _four_bits(e2m1: bool, device: torch.device) -> torch.Tensor:
    """Values of the lower and upper half of every byte, [256, 2], on a device."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)]) if e2m1 else torch.arange(16, dtype=torch.float32)
    both = torch.arange(256)
    return torch.stack([values[both & 15], values[both >> 4]], dim=1).to(device)


def eight_bits(values: torch.Tensor) -> torch.Tensor:
    """Values [..., K] of float8 or int8, K even, as float32."""
    if values.device.type != "cpu" or values.shape[-1] % 2 or not values.is_contiguous():
        return values.to(torch.float32)
    index = values.view(torch.uint8).numpy().view(np.uint16)
    out = torch.empty(values.shape, dtype=torch.float32)
    _eight_bits(values.dtype).take(index, out=out.view(torch.int64).numpy(), mode="wrap")
    return out


def four_bits(pairs: torch.Tensor, e2m1: bool) -> torch.Tensor:
    """Values [..., 2 * K] of bytes [..., K] with two values each, the first in the lower half, as float32.

    Args:
        e2m1: whether the values are E2M1 floats; otherwise integers 0 to 15.
    """
    pairs = pairs.view(torch.uint8)
    table = _four_bits(e2m1, pairs.device)
    if pairs.device.type != "cpu" or not pairs.is_contiguous():
        return table[pairs.int()].flatten(-2)
    out = torch.empty(*pairs.shape[:-1], 2 * pairs.shape[-1], dtype=torch.float32)
    table.view(torch.int64).numpy().reshape(-1).take(pairs.numpy(), out=out.view(torch.int64).numpy(), mode="wrap")
    return out


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents of two with a bias of 127 (E8M0)."""
    if scale.dtype == torch.uint8:
        return (scale.to(torch.float32) - 127).exp2()
    return scale.to(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Scales of a weight [N, K].

    Attributes:
        scale_NG: float32 [N, G], or [1, G] if all rows share them.
        zero_NG: zero points of the same shape; None: 0.
        size: consecutive inputs per group; the last group may be shorter.
        index_K: the group of each input, if groups are not consecutive.
    """

    scale_NG: torch.Tensor
    zero_NG: torch.Tensor | None = None
    size: int
    index_K: torch.Tensor | None = None

    def apply(self, numbers: torch.Tensor, rows: slice) -> None:
        """Subtract the zero points and multiply by the scales, in place.

        Args:
            numbers: some rows [.., K] of the weight.
        """
        size = self.size
        scale, zero = (_rows(tensor, rows) for tensor in (self.scale_NG, self.zero_NG))
        if self.index_K is not None:
            scale, zero, size = _columns(scale, self.index_K), _columns(zero, self.index_K), 1
        elif numbers.shape[1] % size:
            index = torch.arange(numbers.shape[1], device=numbers.device) // size
            scale, zero, size = _columns(scale, index), _columns(zero, index), 1
        grouped = numbers.unflatten(1, (-1, size))
        if zero is not None:
            grouped -= zero[..., None]
        assert scale is not None
        grouped *= scale[..., None]


def _rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return tensor if tensor is None or len(tensor) == 1 else tensor[rows]


def _columns(tensor: torch.Tensor | None, index_K: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor is None else tensor.index_select(1, index_K)


def write_scaled(
    out: torch.Tensor,
    numbers: Callable[[slice], torch.Tensor],
    groups: Groups,
    rounded: torch.dtype = torch.float32,
    multiple: int = 1,
) -> None:
    """Write a weight [N, K], a few rows at a time.

    Args:
        numbers: returns unscaled rows as float32 that may be overwritten.
        rounded: type that the weight is rounded to before the type of `out`.
        multiple: number of rows that must be requested together.
    """
    rows, columns = out.shape
    # A few rows stay in the CPU cache between steps. On a GPU each call costs a launch.
    step = max(1, CHUNK // max(1, columns * multiple)) * multiple if out.device.type == "cpu" else max(1, rows)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        made = numbers(part)
        groups.apply(made, part)
        if rounded not in (torch.float32, out.dtype):
            made.copy_(made.to(rounded))
        out[part] = made
