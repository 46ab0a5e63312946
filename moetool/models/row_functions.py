"""Compiled functions of rows in bfloat16, each in one pass of the calling thread."""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from moetool.models.llvm_vectors import LANES, Vectors

BinaryRowCall = Callable[["BinaryRows", float], None]
"""A call with its rows and a factor."""


class BinaryRows(NamedTuple):
    """Rows of two inputs and of the output.

    Attributes:
        first, second, output: addresses.
        first_step, second_step, output_step: bytes from one row to the next.
        rows: their number.
        vectors: of 16 numbers per row.
    """

    first: int
    first_step: int
    second: int
    second_step: int
    output: int
    output_step: int
    rows: int
    vectors: int


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

    @numba.cfunc(types.void(types.CPointer(types.int64), types.float32), nopython=True)
    def work(job: Any, factor: Any) -> None:
        for row in range(job[6]):
            compute(job[0] + row * job[1], job[2] + row * job[3], job[4] + row * job[5], job[7], factor)

    of_rows = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_float)(work.address)

    def call(rows: BinaryRows, factor: float) -> None:
        numbers = array("q", rows)
        of_rows(numbers.buffer_info()[0], factor)

    call.work = work  # type: ignore[attr-defined]  # keeps the machine code
    return call
