"""Compiled functions of rows in bfloat16, each in one pass of the calling thread."""

import ctypes
from collections.abc import Callable
from typing import Any

from moetool.models.llvm_vectors import LANES, Vectors

BinaryRowCall = Callable[[int, int, int, int, int, int, int, int, float], None]
"""For each of two inputs and the output its address and the bytes from one row to the next; then the number of rows,
vectors of 16 numbers per row, and a factor."""


class BinaryRow:
    """The code of a row: an LLVM builder and the row's addresses, vectors and factor.

    Attributes:
        vectors: the builder's.
        first, second, output: addresses, int64.
        count: vectors of the row, int64.
        factor: float32.
    """

    def __init__(self, builder: Any, arguments: Any) -> None:
        self.vectors = Vectors(builder)
        self.first, self.second, self.output, self.count, self.factor = arguments

    def read(self, address: Any, vector: Any) -> Any:
        """Numbers of a row in float32."""
        v = self.vectors
        return v.widened(v.load(self._place(address, vector), v.of(v.int16), 2))

    def write(self, numbers: Any, vector: Any) -> None:
        """Round numbers of the output."""
        self.vectors.store(self.vectors.bfloat16(numbers), self._place(self.output, vector), 2)

    def _place(self, address: Any, vector: Any) -> Any:
        return self.vectors.builder.add(address, self.vectors.times(vector, 2 * LANES))


def compile_rows(generate: Callable[[BinaryRow], None]) -> BinaryRowCall:
    """Compile a function by its code of one row. Raises: many kinds of errors of numba."""
    import numba
    from numba import types
    from numba.extending import intrinsic

    def of_row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        generate(BinaryRow(builder, arguments))
        return context.get_dummy_value()

    @intrinsic
    def compute(typing_context: Any, first: Any, second: Any, output: Any, count: Any, factor: Any) -> Any:
        return types.void(*[types.int64] * 4, types.float32), of_row

    @numba.cfunc(types.void(*[types.int64] * 8, types.float32), nopython=True)
    def work(
        first: Any,
        first_step: Any,
        second: Any,
        second_step: Any,
        output: Any,
        output_step: Any,
        rows: Any,
        count: Any,
        factor: Any,
    ) -> None:
        for row in range(rows):
            compute(first + row * first_step, second + row * second_step, output + row * output_step, count, factor)

    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8, ctypes.c_float)(work.address)
    call.work = work  # type: ignore[attr-defined]  # keeps the machine code
    return call
