"""Compiled functions of rows in bfloat16, each in one pass."""

import logging
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from moetool.kernels.cpu.threads import next_task_of, on_pool
from moetool.kernels.cpu.vectors import LANES, Vectors

_log = logging.getLogger(__name__)
_TASK_ROWS = 64
_ONE_THREAD = 16_384
"""Most numbers that one thread computes; beyond, two took 0.85 to 0.6 of its time (norms of 128 numbers, an idle Intel
Xeon with AMX)."""
T = TypeVar("T")

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
        self.first, self.second, self.output, self.count, bits = arguments
        self.factor = builder.bitcast(builder.trunc(bits, self.vectors.int32), self.vectors.float32)

    def read(self, address: Any, vector: Any) -> Any:
        """Numbers of a row in float32."""
        v = self.vectors
        return v.widened(v.load(self._place(address, vector), v.of(v.int16), 2))

    def write(self, numbers: Any, vector: Any) -> None:
        """Round numbers of the output."""
        self.vectors.store(self.vectors.bfloat16(numbers), self._place(self.output, vector), 2)

    def _place(self, address: Any, vector: Any) -> Any:
        return self.vectors.builder.add(address, self.vectors.times(vector, 2 * LANES))


def compiled(operations: str, compile: Callable[[], T]) -> T | None:
    """Return a kernel from `compile`; if that fails, warn and return None.

    Args:
        operations: computed by torch instead, for the warning.
        compile: raises if numba is missing or does not support this CPU.
    """
    try:
        return compile()
    except Exception as error:  # numba raises many kinds; torch computes the same
        _log.warning("%s use torch, because numba does not compile the kernel (%s)", operations, error)
        return None


def compile_rows(generate: Callable[[BinaryRow], None]) -> BinaryRowCall:
    """Compile a function by its code of one row. Raises: many kinds of errors of numba."""
    import numba
    from numba import types
    from numba.extending import intrinsic

    next_task = next_task_of()

    def of_row(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        generate(BinaryRow(builder, arguments))
        return context.get_dummy_value()

    @intrinsic
    def compute(typing_context: Any, first: Any, second: Any, output: Any, count: Any, factor: Any) -> Any:
        return types.void(*[types.int64] * 5), of_row

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        rows = job[7]
        first = next_task(job) * _TASK_ROWS
        while first < rows:
            for row in range(first, min(rows, first + _TASK_ROWS)):
                compute(job[1] + row * job[2], job[3] + row * job[4], job[5] + row * job[6], job[8], job[9])
            first = next_task(job) * _TASK_ROWS

    on_threads = on_pool(work)

    def call(rows: BinaryRows, factor: float) -> None:
        threads = torch.get_num_threads() if rows.rows * rows.vectors * LANES > _ONE_THREAD else 1
        on_threads(row_job(rows, factor), threads)

    call.work = work  # type: ignore[attr-defined]
    return call


def row_job(rows: BinaryRows, factor: float) -> list[int]:
    """The job of a function from `compile_rows`."""
    return [0, *rows, *struct.unpack("i", struct.pack("f", factor))]
