"""Rows of x in the order in which a kernel multiplies them with the blocks of a weight."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moetool.kernels.cpu.blocks import row_order
from moetool.kernels.cpu.kinds import RowKind


def ordered_rows(x_TI: torch.Tensor, kind: RowKind) -> torch.Tensor:
    """Rows on the CPU as the kernel of a kind of weight reads them.

    Returns:
        float32 [T, V, *]: the inputs of each of V blocks of a row of the weight; for paired kinds some are pairs of
            bfloat16.
    """
    num_rows, num_inputs = x_TI.shape
    num_blocks = -(-num_inputs // kind.numbers)
    if num_inputs < num_blocks * kind.numbers:
        x_TI = torch.nn.functional.pad(x_TI, (0, num_blocks * kind.numbers - num_inputs))
    narrow = x_TI.dtype == torch.bfloat16
    x_TI = (x_TI if narrow else x_TI.to(torch.float32)).contiguous()
    arrange = ordering(kind, narrow)
    # Another thread that builds a model sets torch's default type.
    ordered = torch.empty(num_rows, num_blocks, row_order(kind).num_bytes // 4, dtype=torch.float32)
    arrange(x_TI.data_ptr(), ordered.data_ptr(), num_rows * num_blocks)
    return ordered


@functools.cache
def ordering(kind: RowKind, narrow: bool) -> Callable[[int, int, int], None]:
    """Compile a function of the address of rows, that of the ordered rows, and the number of blocks.

    A sum in float64 is exact unless its numbers differ by more than 2^40, so its order does not matter.

    Args:
        narrow: the rows are in bfloat16, not in float32.
    """
    import numba
    from numba import types

    from moetool.kernels.cpu.memory import floats, shorts

    order = row_order(kind)
    indices, size, summed, paired = np.array(order.indices), order.num_bytes // 4, order.summed, order.narrow
    parts, factors = (np.array([lane[of] for lane in order.lanes] or [0]) for of in (0, 1))
    numbers, lanes = len(order.indices), len(order.lanes)
    sums = size - lanes
    number = _bfloat16_at() if narrow else numba.njit(lambda x, index: x[index])
    rows = types.CPointer(types.uint16 if narrow else types.float32)

    @numba.cfunc(types.void(rows, types.int64, types.int64), nopython=True)
    def arrange(x: Any, address: Any, blocks: Any) -> None:
        ordered, pairs = floats(address), shorts(address)
        for block in range(blocks):
            first, target = block * numbers, block * size
            for n in range(numbers):
                if paired:
                    pairs[2 * target + n] = x[first + indices[n]]
                else:
                    ordered[target + n] = number(x, first + indices[n])
            for lane in range(lanes):
                total, start = 0.0, first + parts[lane] * summed
                for n in range(start, start + summed):
                    total += np.float64(number(x, n))
                ordered[target + sums + lane] = total * factors[lane]

    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(arrange.address)
    call.work = arrange  # type: ignore[attr-defined]  # keeps the machine code
    return call


def _bfloat16_at() -> Any:
    """numba's `number(x, index)`: the bfloat16 whose bits are at an index, as float32."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def number(typing_context: Any, x: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(32)
            bits = builder.zext(builder.load(builder.gep(arguments[0], [arguments[1]])), word)
            return builder.bitcast(builder.shl(bits, ir.Constant(word, 16)), ir.FloatType())

        return types.float32(x, types.int64), generate

    return number
