"""Products of few rows with bfloat16 weights on a CPU, at the speed of its memory.

A decode step multiplies one row, or a few, with every weight that it reads, so memory bandwidth bounds it. torch's
products of few rows stay far below that bound (`tests/bench/test_row_products.py`). numba compiles the kernel here when
it is first needed. It streams the weights as they are stored, for all experts of a layer in one call.

Each output is one dot product, accumulated in float32 by fused multiply-adds over `_LANES * _CHAINS` interleaved
partial sums that are added pairwise. That order depends on the weight's width alone: not on the processor, the number
of threads, or the rows and experts computed together. So a row has the same result, to the bit, in any batch that the
kernel takes. It differs from torch's product in rounding only.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

MAX_ROWS = 1
"""Rows of a product up to which the kernel is faster than torch's (`tests/bench/test_row_products.py`): at two the
speeds are equal, beyond them the kernel reads the rows of x too often."""
MIN_ELEMENTS = 2**18
"""Numbers in a weight below which calling the kernel costs more than it saves, and so compiling it."""
_LANES = 16  # float32 in a vector of AVX-512; two of AVX2
_CHAINS = 4  # accumulators that hide the latency of an addition
_BLOCK_ROWS = 32  # rows of a weight that one thread takes at a time

_log = logging.getLogger(__name__)
_one_caller = threading.Lock()  # numba's simplest thread pool takes one caller at a time


def multiplies(x: torch.Tensor, weight: Any) -> bool:
    """Whether the kernel takes the product of rows x [T, I] with the transpose of a weight [O, I]."""
    return 0 < len(x) <= MAX_ROWS and takes(weight)


def takes(weight: Any) -> bool:
    """Whether the kernel takes products of up to `MAX_ROWS` rows with this weight [O, I]."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= MIN_ELEMENTS
        and weight.shape[1] % (_LANES * _CHAINS) == 0
        and weight.shape[0] % _BLOCK_ROWS == 0
        and weight.is_contiguous()
        and find_kernel() is not None
    )


def products(xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The products x @ weight.T of several weights of one shape, computed in one call.

    Args:
        xs: the rows [T, I] of each weight, at most `MAX_ROWS`, all of one dtype, on the CPU.
        weights: bfloat16 [O, I] that `takes` accepts.

    Returns:
        For each weight [T, O], of the dtype of `xs`.
    """
    kernel = find_kernel()
    assert kernel is not None, "takes() says whether there is a kernel"
    num_outputs, num_inputs = weights[0].shape
    starts = np.zeros(len(xs) + 1, dtype=np.int64)
    np.cumsum([len(x) for x in xs], out=starts[1:])
    x_RI = (xs[0] if len(xs) == 1 else torch.cat(list(xs))).to(torch.float32).contiguous()
    output_RO = torch.empty(len(x_RI), num_outputs, dtype=torch.float32)
    addresses = np.array([weight.data_ptr() for weight in weights], dtype=np.int64)
    with _one_caller:
        kernel(addresses, starts, x_RI.data_ptr(), output_RO.data_ptr(), num_outputs, num_inputs)
    return list(output_RO.to(xs[0].dtype).split([len(x) for x in xs]))


class RowLinear(torch.nn.Linear):
    """A linear layer that the kernel computes for few rows, and torch for many.

    `adopt` turns a `torch.nn.Linear` into one in place.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if not 0 < rows <= MAX_ROWS:
            return super().forward(input)
        (output,) = products([input.reshape(rows, self.in_features)], [self.weight])
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def adopt(model: torch.nn.Module) -> int:
    """Have the kernel compute the linear layers of a model that it takes; returns how many.

    Side effects: changes the class of those layers to `RowLinear`; compiles the kernel if there is one such layer.
    """
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear and takes(m.weight)]
    for module in linears:
        module.__class__ = RowLinear
    return len(linears)


@functools.cache
def find_kernel() -> Callable[..., None] | None:
    """The compiled kernel; None where numba is missing or does not compile it for this processor."""
    try:
        return _compile()
    except Exception as error:  # numba raises many kinds; torch computes the same products
        _log.warning("products of few rows stay with torch: numba does not compile the kernel (%s)", error)
        return None


def _compile() -> Callable[..., None]:
    import numba

    dot = _dot()

    @numba.njit(parallel=True, nogil=True, cache=False)
    def kernel(addresses: Any, starts: Any, x: int, output: int, num_outputs: int, num_inputs: int) -> None:
        blocks = num_outputs // _BLOCK_ROWS
        for task in numba.prange(addresses.shape[0] * blocks):
            which = task // blocks
            first = (task % blocks) * _BLOCK_ROWS
            for row in range(first, first + _BLOCK_ROWS):
                weight = addresses[which] + row * num_inputs * 2
                for r in range(starts[which], starts[which + 1]):
                    dot(weight, x + r * num_inputs * 4, output + (r * num_outputs + row) * 4, num_inputs)

    def call(*arguments: Any) -> None:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        kernel(*arguments)

    x = np.ones((1, _LANES * _CHAINS), dtype=np.float32)
    weight = np.zeros((_BLOCK_ROWS, _LANES * _CHAINS), dtype=np.uint16)
    output = np.ones((1, _BLOCK_ROWS), dtype=np.float32)
    starts = np.array([0, 1])
    call(np.array([weight.ctypes.data]), starts, x.ctypes.data, output.ctypes.data, _BLOCK_ROWS, x.shape[1])
    if output.any():
        raise RuntimeError("it computes something else")
    return call


def _dot() -> Any:
    """numba's `dot(weight, x, output, num_inputs)`, written in LLVM's vectors.

    It stores at `output` the dot product of a row of a weight (bfloat16 at `weight`) with a row of x (float32 at `x`).
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    int16, int32, int64, float32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
    halves, words, floats = (ir.VectorType(kind, _LANES) for kind in (int16, int32, float32))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, x, output, num_inputs = arguments
        fma_type = ir.FunctionType(floats, [floats] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{_LANES}f32")

        def load(address: Any, index: Any, num_bytes: int, kind: Any) -> Any:
            place = builder.add(address, builder.mul(index, ir.Constant(int64, num_bytes)))
            value = builder.load(builder.inttoptr(place, kind.as_pointer()))
            value.align = num_bytes
            return value

        sums = [cgutils.alloca_once(builder, floats) for _ in range(_CHAINS)]
        for place in sums:
            builder.store(ir.Constant(floats, [0.0] * _LANES), place)
        step = ir.Constant(int64, _LANES * _CHAINS)
        with cgutils.for_range(builder, builder.sdiv(num_inputs, step)) as loop:
            for chain, place in enumerate(sums):
                index = builder.add(builder.mul(loop.index, step), ir.Constant(int64, chain * _LANES))
                bits = builder.zext(load(weight, index, 2, halves), words)
                widened = builder.bitcast(builder.shl(bits, ir.Constant(words, [16] * _LANES)), floats)
                value = load(x, index, 4, floats)
                builder.store(builder.call(multiply_add, [widened, value, builder.load(place)]), place)
        total = _pairwise(builder, [builder.load(place) for place in sums])
        builder.store(total, builder.inttoptr(output, float32.as_pointer()))
        return context.get_dummy_value()

    @intrinsic
    def dot(typing_context: Any, weight: Any, x: Any, output: Any, num_inputs: Any) -> Any:
        return types.void(*[types.int64] * 4), generate

    return dot


def _pairwise(builder: Any, vectors: list[Any]) -> Any:
    """The sum of all elements of some vectors of `_LANES`, added pairwise."""
    from llvmlite import ir

    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total, width = vectors[0], _LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(total.type, ir.Undefined)
        places = (
            ir.Constant(ir.VectorType(ir.IntType(32), width), [*range(first, first + width)]) for first in (0, width)
        )
        total = builder.fadd(*(builder.shuffle_vector(total, nothing, mask) for mask in places))
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
