"""Dot products of a weight's row with rows of x, and unpacking, as functions for numba.

Each output is one dot product, accumulated in float32 by fused multiply-adds over interleaved partial sums that are
added pairwise. That order depends only on the kind of weight and its width. It does not depend on the CPU, the number
of threads, or the rows and weights computed together, so a row's result is bit-identical in any batch. Paired kinds
(`moetool.kernels.cpu.blocks.paired`) have an order of their own.
"""

from typing import Any, NamedTuple

from moetool.kernels.cpu.blocks import row_block, row_order
from moetool.kernels.cpu.ggml_reader import RowGroup
from moetool.kernels.cpu.kinds import VECTOR_BYTES, RowKind
from moetool.kernels.cpu.numbers import byte_scales, run, run_length
from moetool.kernels.cpu.vectors import LANES, Vectors, pairwise_sum


class RowJob(NamedTuple):
    """The first numbers of a call of a kernel; those of `RowShape` and the lists follow.

    The lists: for each weight the addresses of its values and scales and its first pair, then the end of the last
    weight's pairs; for each pair the row of x and the row of the output.

    Attributes:
        next_task: 0; the threads increment it.
        x: address of rows as `moetool.kernels.cpu.inputs` orders them.
        output: address, [R, O] of float32 or bfloat16; for unpacked weights bfloat16 [O, I].
        narrow: 1 if the output is in bfloat16, else 0.
        ahead: prefetch distance in bytes.
    """

    next_task: int
    x: int
    output: int
    narrow: int
    ahead: int
    weights: int


class RowShape(NamedTuple):
    """Sizes that all weights of a call share.

    Attributes:
        outputs: O.
        x_bytes: bytes of a row of x.
        row_bytes: bytes of a row of a weight.
        groups: groups of columns with a scale each, or 1.
        vectors: blocks in such a group.
        scale_rows: rows of the weight that share a row of scales.
    """

    outputs: int
    x_bytes: int
    row_bytes: int
    groups: int
    vectors: int
    scale_rows: int
    scale_bytes: int


SCALE_BYTES = 4
"""Bytes of a row's own scale, before those of its groups."""
PLACES = {name: index for index, name in enumerate(RowJob._fields + RowShape._fields)}
"""Index of each number in a job."""


def dot_of(kind: RowKind, count: int) -> Any:
    """numba's `dot(weight, scale, job, pair, row)`, written in LLVM's vectors.

    It computes the dot products of a row of a weight with `count` rows of x. `job[pair]` and the following entries hold
    the row numbers of x and of the output.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, scale, job, pair, row = arguments
        vectors = Vectors(builder)

        def number(index: Any) -> Any:
            return builder.load(builder.gep(job, [index]))

        def field(name: str) -> Any:
            return number(vectors.number(PLACES[name]))

        def accumulators(chains: int) -> list[list[Any]]:
            return [[cgutils.alloca_once(builder, vectors.floats) for _ in range(chains)] for _ in range(count)]

        def clear(sums: list[list[Any]]) -> None:
            for pointer in (pointer for each in sums for pointer in each):
                builder.store(vectors.all(vectors.float32, 0.0), pointer)

        def add(first: Any, sums: list[list[Any]]) -> None:
            """Add the products of `unroll` blocks, starting with block `first`."""
            chain = 0
            for step in range(kind.unroll):
                vector = builder.add(first, vectors.number(step))
                offset = vectors.times(vector, kind.block_bytes)
                for line in range(0, kind.block_bytes, VECTOR_BYTES):
                    ahead = builder.add(builder.add(weight, field("ahead")), vectors.number(line))
                    vectors.prefetch(builder.add(ahead, offset))
                x_offset = vectors.times(vector, row_order(kind).num_bytes)
                block = row_block(vectors, kind, builder.add(weight, offset))
                for group in block.groups:
                    for row_x, chains in zip(rows, sums, strict=True):
                        add_group(group, builder.add(row_x, x_offset), chains, chain)
                    x_offset = builder.add(x_offset, vectors.number(4 * LANES * len(group.planes)))
                    chain += 1 if group.scale is not None else len(group.planes)
                if block.sum_factors is not None:
                    for row_x, chains in zip(rows, sums, strict=True):
                        value = vectors.load(builder.add(row_x, x_offset), vectors.floats)
                        pointer = chains[chain % kind.chains]
                        builder.store(vectors.multiply_add(block.sum_factors, value, builder.load(pointer)), pointer)
                    chain += 1

        def add_group(group: RowGroup, x: Any, chains: list[Any], first: int) -> None:
            """Add the products of a group with a row: each to the next chain, or their scaled sum to one chain."""
            total = vectors.all(vectors.float32, 0.0)
            for number, plane in enumerate(group.planes):
                if kind.paired:
                    pairs = vectors.load(builder.add(x, vectors.number(VECTOR_BYTES * number)), vectors.words)
                    total = vectors.pair_products(plane, pairs, total)
                    continue
                value = vectors.load(builder.add(x, vectors.number(4 * LANES * number)), vectors.floats)
                if group.scale is not None:
                    total = vectors.multiply_add(plane, value, total)
                    continue
                pointer = chains[(first + number) % kind.chains]
                builder.store(vectors.multiply_add(plane, value, builder.load(pointer)), pointer)
            if group.scale is not None:
                pointer = chains[first % kind.chains]
                builder.store(vectors.multiply_add(group.scale, total, builder.load(pointer)), pointer)

        rows = []
        for each in range(count):
            source = number(builder.add(pair, vectors.number(2 * each)))
            rows.append(builder.add(field("x"), builder.mul(source, field("x_bytes"))))
        whole_at, groups_at = scale, builder.add(scale, vectors.number(SCALE_BYTES if kind.scale == "float8" else 0))
        totals = accumulators(kind.chains)
        clear(totals)
        if not kind.has_scales:
            steps = builder.sdiv(field("vectors"), vectors.number(kind.unroll))
            with cgutils.for_range(builder, steps) as loop:
                add(vectors.times(loop.index, kind.unroll), totals)
        else:
            sums = accumulators(kind.chains)
            with cgutils.for_range(builder, field("groups")) as group:
                clear(sums)
                if each := kind.scales_a_block:
                    add(group.index, sums)
                    at = builder.add(groups_at, vectors.times(group.index, each))
                    factor = vectors.shuffled(
                        byte_scales(vectors, kind, at, each), [n * each // LANES for n in range(LANES)]
                    )
                else:
                    begin = builder.mul(group.index, field("vectors"))
                    with cgutils.for_range(builder, field("vectors")) as loop:
                        add(builder.add(begin, loop.index), sums)
                    at = builder.add(scale, vectors.times(group.index, 4))
                    factor = vectors.broadcast(vectors.load(at, vectors.float32))
                for chains, whole in zip(sums, totals, strict=True):
                    for pointer, total in zip(chains, whole, strict=True):
                        made = vectors.multiply_add(factor, builder.load(pointer), builder.load(total))
                        builder.store(made, total)
        for each, chains in enumerate(totals):
            made = pairwise_sum(builder, [builder.load(pointer) for pointer in chains])
            if kind.scale == "float8":
                whole = vectors.load(whole_at, vectors.float32)
                made = builder.fdiv(made, whole) if kind.divides else builder.fmul(made, whole)
            target = number(builder.add(pair, vectors.number(2 * each + 1)))
            at = builder.add(builder.mul(target, field("outputs")), row)
            with builder.if_else(builder.icmp_signed("!=", field("narrow"), vectors.number(0))) as (narrow, wide):
                with narrow:
                    vectors.store(vectors.bfloat16(made), builder.add(field("output"), vectors.times(at, 2)), 2)
                with wide:
                    vectors.store(made, builder.add(field("output"), vectors.times(at, 4)))
        return context.get_dummy_value()

    @intrinsic
    def dot(typing_context: Any, weight: Any, scale: Any, job: Any, pair: Any, row: Any) -> Any:
        return types.void(types.int64, types.int64, job, types.int64, types.int64), generate

    return dot


def unpacking_of(kind: RowKind, *, at_once: bool = False, wide: bool = False) -> Any:
    """numba's `unpack(weight, scale, group, runs, output)`: a group of a row times its scale, rounded to bfloat16.

    Args:
        at_once: round by the CPU's instruction for it, which makes subnormal numbers 0.
        wide: write float32.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    length = run_length(kind)
    run_bytes = kind.row_bytes(length)
    size, rounded = (4, Vectors.rounded_wide) if wide else (2, Vectors.rounded)

    def factors_of(vectors: Vectors, scale: Any, group: Any) -> list[Any]:
        """Scale of each vector of a run."""
        builder, planes_a_run = vectors.builder, length // LANES
        if not kind.scales_a_block:
            one = vectors.load(builder.add(scale, vectors.times(group, 4)), vectors.float32)
            return [vectors.broadcast(one)] * planes_a_run
        each = kind.scales_a_block * length // kind.numbers
        start = vectors.number(SCALE_BYTES if kind.scale == "float8" else 0)
        at = builder.add(builder.add(scale, start), vectors.times(group, each))
        scales = byte_scales(vectors, kind, at, each)
        made = [vectors.shuffled(scales, [n * each // planes_a_run] * LANES) for n in range(planes_a_run)]
        if kind.scale == "exponent":
            return made
        whole = vectors.broadcast(vectors.load(scale, vectors.float32))
        return [builder.fdiv(one, whole) if kind.divides else builder.fmul(one, whole) for one in made]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, scale, group, runs, output = arguments
        vectors = Vectors(builder)
        factors = factors_of(vectors, scale, group) if kind.has_scales else None
        with cgutils.for_range(builder, runs) as loop:
            at = builder.add(builder.mul(group, runs), loop.index)
            target = builder.add(output, vectors.times(at, size * length))
            for index, numbers in enumerate(run(vectors, kind, builder.add(weight, vectors.times(at, run_bytes)))):
                scaled = numbers if factors is None else builder.fmul(numbers, factors[index])
                vectors.store(vectors.converted(scaled) if at_once else rounded(vectors, scaled), target, 2)
                target = builder.add(target, vectors.number(size * LANES))
        return context.get_dummy_value()

    @intrinsic
    def unpack(typing_context: Any, weight: Any, scale: Any, group: Any, runs: Any, output: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return unpack
