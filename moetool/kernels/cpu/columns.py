"""Products of few rows with bfloat16 weights stored [in, out].

Each output is one sum over the inputs in their order, in float32 by fused multiply-adds. So a row's result is
bit-identical in any batch, on any number of threads.
"""

from typing import Any

from moetool.kernels.cpu.dots import PLACES
from moetool.kernels.cpu.threads import PoolCall, next_task_of, on_pool
from moetool.kernels.cpu.vectors import LANES, Vectors

_TOGETHER = 8
"""Vectors of outputs that a pass over the inputs sums: four cache lines of each row of the weight."""
_LEAST = 2
_LINE = 64
_HEAD = len(PLACES)


def compile_columns(task_bytes: int, tasks: int) -> PoolCall:
    """Compile the kernel; its jobs are those of weights stored [out, in] (`moetool.kernels.cpu.dots`).

    Args:
        task_bytes: most bytes of a task.
        tasks: least number of tasks, if the weights suffice.
    """
    import numba
    from numba import types

    next_task = next_task_of()
    wide_2, wide_1, narrow_2, narrow_1 = (_sums_of(rows, vectors) for vectors in (_TOGETHER, _LEAST) for rows in (2, 1))
    outputs_at, row_bytes_at, weights_at = PLACES["outputs"], PLACES["row_bytes"], PLACES["weights"]
    wide, least = _TOGETHER * LANES, _LEAST * LANES

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        outputs, num_weights = job[outputs_at], job[weights_at]
        starts = _HEAD + 2 * num_weights
        pairs = starts + num_weights + 1
        step = min(task_bytes // job[row_bytes_at], num_weights * outputs // tasks)
        step = max(step // wide, 1) * wide
        blocks = -(-outputs // step)
        task = next_task(job)
        while task < num_weights * blocks:
            which = task // blocks
            begin = (task % blocks) * step
            r, end = job[starts + which], job[starts + which + 1]
            while r < end:
                pair, first = pairs + 2 * r, begin
                while first < min(begin + step, outputs):
                    weight = job[_HEAD + which] + 2 * first
                    if first + wide <= outputs:
                        if r + 2 <= end:
                            wide_2(weight, job, pair, first)
                        else:
                            wide_1(weight, job, pair, first)
                        first += wide
                    else:
                        if r + 2 <= end:
                            narrow_2(weight, job, pair, first)
                        else:
                            narrow_1(weight, job, pair, first)
                        first += least
                r += 2
            task = next_task(job)

    return on_pool(work)


def _sums_of(count: int, together: int) -> Any:
    """numba's `sums(weight, job, pair, first)`: outputs from `first` on of `count` rows of x, in LLVM's vectors."""
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, job, pair, first = arguments
        v = Vectors(builder)

        def number(index: Any) -> Any:
            return builder.load(builder.gep(job, [index]))

        def field(name: str) -> Any:
            return number(v.number(PLACES[name]))

        step, inputs = v.times(field("outputs"), 2), builder.sdiv(field("x_bytes"), v.number(4))
        rows_ahead = builder.sdiv(field("ahead"), v.number(2 * LANES * together))
        ahead = builder.mul(rows_ahead, step)
        pairs = [builder.add(pair, v.number(2 * each)) for each in range(count)]
        rows = [builder.add(field("x"), builder.mul(number(each), field("x_bytes"))) for each in pairs]
        sums = [[cgutils.alloca_once(builder, v.floats) for _ in range(together)] for _ in range(count)]
        for pointer in (pointer for each in sums for pointer in each):
            builder.store(v.all(v.float32, 0.0), pointer)
        with cgutils.for_range(builder, inputs) as loop:
            at = builder.add(weight, builder.mul(loop.index, step))
            for line in range(0, 2 * LANES * together, _LINE):
                v.prefetch(builder.add(builder.add(at, ahead), v.number(line)))
            factors = [v.broadcast(v.load(builder.add(x, v.times(loop.index, 4)), v.float32)) for x in rows]
            for vector in range(together):
                numbers = v.widened(v.load(builder.add(at, v.number(2 * LANES * vector)), v.of(v.int16), 2))
                for factor, pointers in zip(factors, sums, strict=True):
                    total = v.multiply_add(numbers, factor, builder.load(pointers[vector]))
                    builder.store(total, pointers[vector])
        for each, pointers in zip(pairs, sums, strict=True):
            target = number(builder.add(each, v.number(1)))
            at = builder.add(builder.mul(target, field("outputs")), first)
            with builder.if_else(builder.icmp_signed("!=", field("narrow"), v.number(0))) as (narrow, wide):
                for branch, size in ((narrow, 2), (wide, 4)):
                    with branch:
                        for vector, pointer in enumerate(pointers):
                            made = builder.load(pointer)
                            place = builder.add(v.times(at, size), v.number(size * LANES * vector))
                            v.store(v.bfloat16(made) if size == 2 else made, builder.add(field("output"), place), 2)
        return context.get_dummy_value()

    @intrinsic
    def sums(typing_context: Any, weight: Any, job: Any, pair: Any, first: Any) -> Any:
        return types.void(types.int64, job, types.int64, types.int64), generate

    return sums
