"""SiLU-gated products of experts in bfloat16 on a CPU, in one pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu.activations import BinaryRow, BinaryRowCall, BinaryRows, compile_rows, compiled
from moetool.kernels.cpu.vectors import LANES

Gate = Callable[[torch.Tensor], torch.Tensor]
"""From the first product [T, 2 * I] of an experts' module to the input [T, I] of the second one."""


def gate_of(gate: Gate, is_silu: bool) -> Gate:
    """Return a gate that the kernel computes where it can.

    Args:
        is_silu: whether the gate is SiLU of the first half times the second half, as the kernel computes.

    The kernel's result is that of transformers but for the last bit of an exponential in float32. Each number's result
    is bit-identical in any batch.
    """
    return functools.partial(_gated, gate) if is_silu else gate


class ClampedGate(NamedTuple):
    """gpt-oss's gate: `(clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate))` of alternating numbers."""

    alpha: float
    limit: float


def is_silu_gate(gate: Any) -> bool:
    """Whether a gate is one from `gate_of` that uses the kernel."""
    return isinstance(gate, functools.partial) and gate.func is _gated


def _gated(gate: Gate, both: torch.Tensor) -> torch.Tensor:
    width = both.shape[-1] // 2
    usable = both.dtype == torch.bfloat16 and both.device.type == "cpu" and both.is_contiguous() and not width % LANES
    if not usable or (kernel := find_gate_kernel()) is None:
        return gate(both)
    output = both.new_empty(*both.shape[:-1], width)
    first, step = both.data_ptr(), 4 * width
    addresses = (first, step, first + 2 * width, step, output.data_ptr(), 2 * width)
    kernel(BinaryRows(*addresses, output.numel() // width, width // LANES), 0.0)
    return output


@functools.cache
def find_gate_kernel() -> BinaryRowCall | None:
    """Return the compiled kernel; None if numba is missing or does not compile it for this CPU."""
    return compiled("gates", lambda: compile_rows(_gate))


def _gate(row: BinaryRow) -> None:
    """SiLU of `first`, rounded as transformers rounds it, times `second`."""
    from numba.core import cgutils

    v, builder = row.vectors, row.vectors.builder
    one, zero = v.all(v.float32, 1.0), v.all(v.float32, 0.0)
    with cgutils.for_range(builder, row.count) as loop:
        x = row.read(row.first, loop.index)
        is_negative = builder.fcmp_ordered("<", x, zero)
        power = v.exponential(builder.select(is_negative, x, builder.fneg(x)))
        silu = builder.fdiv(builder.fmul(x, builder.select(is_negative, power, one)), builder.fadd(one, power))
        row.write(builder.fmul(v.widened(v.bfloat16(silu)), row.read(row.second, loop.index)), loop.index)
