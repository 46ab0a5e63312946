"""Choose a device's products over slots."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from moetool.kernels.slot_products import SlotRows, multiply

Multiply = Callable[[torch.Tensor, int, SlotRows, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Same arguments as `moetool.kernels.slot_products.multiply`."""


@functools.cache
def find_multiply(device_type: str) -> Multiply:
    """Return a device's products: Triton's kernels on a GPU (`moetool.kernels.gpu.slots`), else torch's."""
    if device_type == "cuda" and (kernels := triton_kernels()) is not None:
        return kernels.multiply
    return multiply


def find_multiply_packed(device_type: str) -> Callable[..., None] | None:
    """Return the product of few rows with packed weights; None if the device has none."""
    kernels = triton_kernels() if device_type == "cuda" else None
    return None if kernels is None else kernels.multiply_packed


def triton_kernels() -> Any:
    """Return the module with Triton's kernels; None without Triton."""
    try:
        from moetool.kernels.gpu import slots
    except ImportError:
        return None
    return slots
