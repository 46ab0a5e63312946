"""Products of several rows with weights by the tiles of a CPU with AMX, or by its vectors.

A tile holds 16 rows of 32 numbers in bfloat16. Rows of a weight are loaded into tiles as they lie in memory; rows of x
are rearranged first. So with AMX a product of up to 32 rows takes as long as reading the weight. torch's product
rearranges the weight in each call (`tests/bench/test_scaled_weights.py`), and compiles code for each new number of
rows, which takes 8 ms and 1.4 to 2.1 MB. Packed weights are unpacked into the CPU cache, 32 rows at a time, rounded to
bfloat16. Without AMX the same tiles of x are vectors: an instruction of `avx512_bf16` multiplies a pair of inputs of 16
rows. Where it is slow or absent, as with AVX2, two products in float32 give the same sums but for subnormal numbers.

Sums are in float32, in an order that depends only on the width of the weight. So a row's result is bit-identical in any
batch, and differs from torch's only in rounding.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu.activations import compiled
from moetool.kernels.cpu.dots import SCALE_BYTES, RowShape, unpacking_of
from moetool.kernels.cpu.kinds import BFLOAT16, VECTOR_BYTES, RowKind
from moetool.kernels.cpu.numbers import run_length
from moetool.kernels.cpu.threads import PoolCall, next_task_of, on_pool
from moetool.kernels.cpu.vectors import LANES, Vectors, cpu_has_pairs, has_features

FEATURES = ("avx2", "fma")
"""Of the CPU, at least."""
BLOCK_ROWS = 32
"""Rows of a weight per task of a thread: two tiles."""
TILE_ROWS = 16
TILE_INPUTS = 32
_MOST_TILES = 64  # of rearranged x in memory
_TILE_BYTES = 1024
_CACHED_BYTES = 2**20  # of x multiplied with a block of a weight in turn: half of a core's second-level cache
_PAIRS = 4  # of inputs at a time
_SUMS_BYTES = 4 * _TILE_BYTES  # of two tiles of a weight by two of x, in float32
_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of <asm/prctl.h>, x86-64


class TileJob(NamedTuple):
    """The first numbers of a call; those of `RowShape` and the lists follow.

    The lists: for each weight the address of its values and that of its scales; then the first row of each weight among
    all rows, and the end of the last; likewise their tiles; then the row of the output for each row.

    Attributes:
        next_task: 0; the threads increment it.
        threads: 0; each thread increments it once.
        x: address of the rearranged rows.
        output: address, bfloat16 [R, O].
        inputs: I.
        room: address of each thread's memory, `room_bytes` each.
        room_bytes: of a thread.
        tiles: address of the configuration of tiles.
    """

    next_task: int
    threads: int
    x: int
    output: int
    weights: int
    inputs: int
    room: int
    room_bytes: int
    tiles: int


class Rows(NamedTuple):
    """Rows of x for one weight: addresses of the weight's values and scales, rows of x and of the output."""

    values: int
    scale: int
    sources: Sequence[int]
    targets: Sequence[int]


_PLACES = {name: place for place, name in enumerate(TileJob._fields + RowShape._fields)}
_HEAD = len(_PLACES)


def tile_products(
    multiply: PoolCall, x_TI: torch.Tensor, rows: Sequence[Rows], shape: RowShape, output_RO: torch.Tensor
) -> None:
    """Multiply rows of one x by several weights of one shape and kind.

    Args:
        multiply: from `find_tiles` for the weights' kind.
        x_TI: in bfloat16, as wide as the weights.
        rows: at least one for each weight.
        output_RO: in bfloat16; its rows `targets` are written.
    """
    x_TI = x_TI.contiguous()
    most = max(1, _CACHED_BYTES // (2 * x_TI.shape[1] * TILE_ROWS)) * TILE_ROWS
    rows = [part for each in rows for part in _parts(each, most)]
    if len(rows) > 1 and sum(-(-len(each.sources) // TILE_ROWS) for each in rows) > _MOST_TILES:
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            tile_products(multiply, x_TI, half, shape, output_RO)
        return
    threads, inputs = torch.get_num_threads(), x_TI.shape[1]
    starts, tiles = [0], [0]
    sources: list[int] = []
    targets: list[int] = []
    for each in rows:
        count = len(each.sources)
        starts.append(starts[-1] + count)
        tiles.append(tiles[-1] - (-count // TILE_ROWS))
        sources += [*each.sources, *[each.sources[0]] * (-count % TILE_ROWS)]
        targets += each.targets
    x = torch.empty(tiles[-1] * TILE_ROWS, inputs, dtype=torch.bfloat16)
    _arranging()([0, x_TI.data_ptr(), x.data_ptr(), tiles[-1], 2 * inputs, *sources], threads)
    room_bytes = _SUMS_BYTES + BLOCK_ROWS * ((4 if widens_bfloat16() else 2) * inputs + VECTOR_BYTES)
    room = torch.empty(threads * room_bytes, dtype=torch.uint8)
    head = TileJob(
        next_task=0,
        threads=0,
        x=x.data_ptr(),
        output=output_RO.data_ptr(),
        weights=len(rows),
        inputs=inputs,
        room=room.data_ptr(),
        room_bytes=room_bytes,
        tiles=_configuration().data_ptr(),
    )
    job = [*head, *shape, *(each.values for each in rows), *(each.scale for each in rows)]
    multiply([*job, *starts, *tiles, *targets], threads)


def _parts(rows: Rows, most: int) -> list[Rows]:
    """Split rows of a weight into parts of at most this many."""
    starts = range(0, len(rows.sources), most)
    return [rows._replace(sources=rows.sources[n : n + most], targets=rows.targets[n : n + most]) for n in starts]


@functools.cache
def find_tiles(kind: RowKind) -> PoolCall | None:
    """Return the compiled function for a kind of weight; None if the CPU has no instruction for it, or numba fails."""
    if not has_features(*FEATURES):
        return None

    def compile_sound() -> PoolCall:
        multiply = _compile(kind)
        _require_sound(kind, multiply)
        return multiply

    return compiled("products of several rows", compile_sound)


@functools.cache
def cpu_has_tiles() -> bool:
    """Whether this process may use AMX for bfloat16; asks the system for permission."""
    if sys.platform != "linux" or not has_features("amx-tile", "amx-bf16") or not cpu_has_pairs():
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def widens_bfloat16() -> bool:
    """Whether products in float32 are the fastest: without AMX, but for the `avx512_bf16` of AMD's processors."""
    return not cpu_has_tiles() and not has_features("avx512bf16", "sse4a")  # AMD alone has the latter


def _require_sound(kind: RowKind, multiply: PoolCall) -> None:
    """Raises: RuntimeError: a product of ones is wrong."""
    rows, blocks = 2 * TILE_ROWS + 1, 2 * kind.unroll
    inputs, row_bytes = blocks * kind.numbers, blocks * kind.block_bytes
    ones = kind.one * (BLOCK_ROWS * row_bytes // len(kind.one))
    weight = torch.frombuffer(bytearray(ones), dtype=torch.uint8).view(BLOCK_ROWS, row_bytes)
    scale = torch.full((1 + 2 * blocks,), kind.factor, dtype=torch.float32)
    if kind.scales_a_block:
        scale.view(torch.uint8)[SCALE_BYTES if kind.scale == "float8" else 0 :] = (
            127 if kind.scale == "exponent" else 0x38
        )
    groups = blocks if kind.scales_a_block else 1
    shape = RowShape(
        outputs=BLOCK_ROWS,
        x_bytes=0,
        row_bytes=row_bytes,
        groups=groups,
        vectors=blocks // groups,
        scale_rows=BLOCK_ROWS,
        scale_bytes=0,
    )
    x, output = torch.ones(rows, inputs, dtype=torch.bfloat16), torch.zeros(rows, BLOCK_ROWS, dtype=torch.bfloat16)
    x *= torch.arange(1, rows + 1)[:, None]
    all_rows = Rows(weight.data_ptr(), scale.data_ptr(), range(rows), range(rows))
    tile_products(multiply, x, [all_rows], shape, output)
    expected = (inputs * torch.arange(1, rows + 1)).to(torch.bfloat16)
    if not (output == expected[:, None]).all():
        raise RuntimeError("its result is wrong")


@functools.cache
def _configuration() -> torch.Tensor:
    """Eight tiles of 16 rows of 64 bytes, as `ldtilecfg` reads them."""
    tiles = torch.zeros(64, dtype=torch.uint8)
    tiles[0] = 1  # the palette
    tiles[16:32:2] = 64
    tiles[48:56] = TILE_ROWS
    return tiles


def _compile(kind: RowKind) -> PoolCall:
    import numba
    from numba import types

    next_task, next_thread = next_task_of(), next_task_of(_PLACES["threads"])
    widens = widens_bfloat16()
    size = 4 if widens else 2
    block_of = _block_of if cpu_has_tiles() else _widened_block_of if widens else _paired_block_of
    widen = _widening()
    most_tiles = 2 if has_features("avx512f") else 1  # of x whose sums fit in registers
    multiply_1, multiply_most, (turn, put) = block_of(1), block_of(most_tiles), _putting()
    configure, release = _configuring()
    outputs_at, row_bytes_at, x_at, output_at = (_PLACES[name] for name in ("outputs", "row_bytes", "x", "output"))
    weights_at, inputs_at, room_at = _PLACES["weights"], _PLACES["inputs"], _PLACES["room"]
    room_bytes_at, tiles_at = _PLACES["room_bytes"], _PLACES["tiles"]
    scale_rows_at, scale_bytes_at = _PLACES["scale_rows"], _PLACES["scale_bytes"]
    groups_at, vectors_at = _PLACES["groups"], _PLACES["vectors"]
    packed = kind is not BFLOAT16
    unpack: Any = unpacking_of(kind, at_once=cpu_has_pairs() and not widens, wide=widens) if packed else None
    run_bytes = kind.row_bytes(run_length(kind))
    per_vector, each_run = max(1, VECTOR_BYTES // run_bytes), kind.scale != "float32"

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        row_bytes, scale_rows, scale_bytes = job[row_bytes_at], job[scale_rows_at], job[scale_bytes_at]
        num_weights, inputs, outputs = job[weights_at], job[inputs_at], job[outputs_at]
        scales = _HEAD + num_weights
        starts = scales + num_weights
        tiles = starts + num_weights + 1
        targets = tiles + num_weights + 1
        steps, tile_row = inputs // TILE_INPUTS, 2 * TILE_ROWS * inputs
        sums = job[room_at] + next_thread(job) * job[room_bytes_at]
        made, made_bytes = sums + _SUMS_BYTES, size * inputs + VECTOR_BYTES  # powers of two share cache lines
        runs = row_bytes // run_bytes
        groups, per_group = (runs, 1) if each_run else (job[groups_at], job[vectors_at] * per_vector)
        blocks = outputs // BLOCK_ROWS
        task = next_task(job)
        configure(job[tiles_at])
        while task < num_weights * blocks:
            which = task // blocks
            first = (task % blocks) * BLOCK_ROWS
            block, width = job[_HEAD + which] + first * row_bytes, row_bytes
            if packed:
                for row in range(BLOCK_ROWS):
                    weight = block + row * row_bytes
                    scale = job[scales + which] + (first + row) // scale_rows * scale_bytes
                    for group in range(groups):
                        unpack(weight, scale, group, per_group, made + row * made_bytes)
                block, width = made, made_bytes
            elif widens:
                for row in range(BLOCK_ROWS):
                    widen(block + row * width, inputs // LANES, made + row * made_bytes)
                block, width = made, made_bytes
            tile, last = job[tiles + which], job[tiles + which + 1]
            row, end = job[starts + which], job[starts + which + 1]
            while tile < last:  # the block stays in the CPU cache
                together = min(most_tiles, last - tile)
                x = job[x_at] + tile * tile_row
                if together == most_tiles:
                    multiply_most(block, width, x, tile_row, steps, sums)
                else:
                    multiply_1(block, width, x, tile_row, steps, sums)
                for each in range(2 * together):
                    turn(sums + each * _TILE_BYTES)
                for place in range(min(end - row, together * TILE_ROWS)):
                    target = job[output_at] + 2 * (job[targets + row + place] * outputs + first)
                    put(sums + place * VECTOR_BYTES, target)
                    put(sums + together * _TILE_BYTES + place * VECTOR_BYTES, target + 2 * TILE_ROWS)
                tile += together
                row += together * TILE_ROWS
            task = next_task(job)
        release()

    return on_pool(work)


@functools.cache
def _arranging() -> PoolCall:
    """A compiled function that rearranges rows of x for tiles: pairs of inputs by row, 16 pairs at a time.

    Its job: 0, the addresses of x and of the result, the number of tiles, bytes of a row; then the row of x for each
    row of a tile.
    """
    import numba
    from numba import types

    next_task, turn = next_task_of(), _turning()

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        x, made, tiles, row_bytes = job[1], job[2], job[3], job[4]
        task = next_task(job)
        while task < tiles:
            target = made + task * TILE_ROWS * row_bytes
            for step in range(row_bytes // VECTOR_BYTES):
                turn(job, 5 + task * TILE_ROWS, row_bytes, x + step * VECTOR_BYTES, target + step * _TILE_BYTES)
            task = next_task(job)

    return on_pool(work)


def _turning() -> Any:
    """numba's `turn(job, place, row_bytes, x, target)`: 16 words of each of 16 rows of x, one row a column."""
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        job, place, row_bytes, x, target = arguments
        vectors, loaded = Vectors(builder), []
        for row in range(TILE_ROWS):
            source = builder.load(builder.gep(job, [builder.add(place, vectors.number(row))]))
            loaded.append(vectors.load(builder.add(x, builder.mul(source, row_bytes)), vectors.words))
        for pair, vector in enumerate(_turned(vectors, loaded)):
            vectors.store(vector, builder.add(target, vectors.number(VECTOR_BYTES * pair)))
        return context.get_dummy_value()

    @intrinsic
    def turn(typing_context: Any, job: Any, place: Any, row_bytes: Any, x: Any, target: Any) -> Any:
        return types.void(job, *[types.int64] * 4), generate

    return turn


def _turned(vectors: Vectors, rows: list[Any]) -> list[Any]:
    """The transpose of 16 vectors of 16 elements."""
    for width in (1, 2, 4, 8):
        upper = [lane & width for lane in range(LANES)]
        first = [LANES + lane - width if upper[lane] else lane for lane in range(LANES)]
        second = [LANES + lane if upper[lane] else lane + width for lane in range(LANES)]
        made = list(rows)
        for row in range(LANES):
            if not row & width:
                made[row] = vectors.merged(rows[row], rows[row + width], first)
                made[row + width] = vectors.merged(rows[row], rows[row + width], second)
        rows = made
    return rows


def _block_of(tiles: int) -> Any:
    """numba's `multiply(block, row_bytes, x, tile_row, steps, sums)`.

    It multiplies `BLOCK_ROWS` rows of a weight by this number of tiles of x, `tile_row` bytes apart, and writes the
    sums [2, tiles, 16 rows of the weight, 16 rows of x].
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block, row_bytes, x, tile_row, steps, sums = arguments
        vectors = Vectors(builder)
        byte, nothing = vectors.int8.as_pointer(), vectors.ir.VoidType()
        load = vectors.function("llvm.x86.tileloadd64", nothing, vectors.int8, byte, vectors.int64)
        write = vectors.function("llvm.x86.tilestored64", nothing, vectors.int8, byte, vectors.int64)
        clear = vectors.function("llvm.x86.tilezero", nothing, vectors.int8)
        add = vectors.function("llvm.x86.tdpbf16ps", nothing, *[vectors.int8] * 3)
        weights, inputs = (0, 1), range(2, 2 + tiles)
        total = {(w, i): 4 + number for number, (w, i) in enumerate((w, i) for w in weights for i in inputs)}

        def tile(number: int) -> Any:
            return vectors.ir.Constant(vectors.int8, number)

        def at(address: Any, offset: Any) -> Any:
            return builder.inttoptr(builder.add(address, offset), byte)

        for number in total.values():
            builder.call(clear, [tile(number)])
        with cgutils.for_range(builder, steps) as loop:
            for w in weights:
                offset = builder.add(vectors.times(row_bytes, TILE_ROWS * w), vectors.times(loop.index, 64))
                builder.call(load, [tile(w), at(block, offset), row_bytes])
            for place, i in enumerate(inputs):
                offset = builder.add(vectors.times(tile_row, place), vectors.times(loop.index, _TILE_BYTES))
                builder.call(load, [tile(i), at(x, offset), vectors.number(64)])
            for (w, i), number in total.items():
                builder.call(add, [tile(number), tile(w), tile(i)])
        for place, number in enumerate(total.values()):
            builder.call(write, [tile(number), at(sums, vectors.number(place * _TILE_BYTES)), vectors.number(64)])
        return context.get_dummy_value()

    @intrinsic
    def multiply(typing_context: Any, block: Any, row_bytes: Any, x: Any, tile_row: Any, steps: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return multiply


def _paired_block_of(tiles: int) -> Any:
    """Like `_block_of`, by `avx512_bf16`: a vector has a number of each row of a tile of x."""

    def add(v: Vectors, row: Any, pair: Any, inputs: list[Any], totals: list[Any]) -> list[Any]:
        weight = v.broadcast(v.load(v.builder.add(row, v.times(pair, 4)), v.int32))
        return [v.pair_products(given, weight, total) for given, total in zip(inputs, totals, strict=True)]

    return _vector_block_of(tiles, add)


def _widened_block_of(tiles: int) -> Any:
    """Like `_paired_block_of`, by products in float32 with a weight in float32, in the order of pair products."""

    def add(v: Vectors, row: Any, pair: Any, inputs: list[Any], totals: list[Any]) -> list[Any]:
        upper, shift = v.all(v.int32, -(2**16)), v.all(v.int32, 16)
        for half in (1, 0):
            weight = v.broadcast(
                v.load(v.builder.add(row, v.builder.add(v.times(pair, 8), v.number(4 * half))), v.float32)
            )
            for place, given in enumerate(inputs):
                words = v.builder.and_(given, upper) if half else v.builder.shl(given, shift)
                totals[place] = v.multiply_add(v.builder.bitcast(words, v.floats), weight, totals[place])
        return totals

    return _vector_block_of(tiles, add)


def _vector_block_of(tiles: int, add: Callable[[Vectors, Any, Any, list[Any], list[Any]], list[Any]]) -> Any:
    """Like `_block_of`, by vectors that have a number of each row of a tile of x.

    Args:
        add: generates the products of a pair of inputs of tiles with a row of the weight, from its address and the
            number of the pair, added to totals.
    """
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block, row_bytes, x, tile_row, steps, sums = arguments
        v = Vectors(builder)
        together = 8 if has_features("avx512f") else 4  # rows of a weight whose sums take half of the registers
        with cgutils.for_range(builder, v.number(BLOCK_ROWS // together)) as part:
            first = v.times(part.index, together)
            rows = [builder.mul(builder.add(first, v.number(n)), row_bytes) for n in range(together)]
            rows = [builder.add(block, offset) for offset in rows]
            totals = [[cgutils.alloca_once(builder, v.floats) for _ in range(tiles)] for _ in rows]
            for total in (total for each in totals for total in each):
                builder.store(v.all(v.float32, 0.0), total)
            with cgutils.for_range(builder, v.times(steps, TILE_INPUTS // 2 // _PAIRS)) as loop:
                for n in range(_PAIRS):
                    pair = builder.add(v.times(loop.index, _PAIRS), v.number(n))
                    at = builder.add(x, v.times(pair, VECTOR_BYTES))
                    inputs = [v.load(builder.add(at, v.times(tile_row, n)), v.words) for n in range(tiles)]
                    for row, each in zip(rows, totals, strict=True):
                        made = add(v, row, pair, inputs, [builder.load(total) for total in each])
                        for total, value in zip(each, made, strict=True):
                            builder.store(value, total)
            half = builder.udiv(first, v.number(TILE_ROWS))
            for n, each in enumerate(totals):
                within = builder.urem(builder.add(first, v.number(n)), v.number(TILE_ROWS))
                for place, total in enumerate(each):
                    tile = builder.add(v.times(half, tiles), v.number(place))
                    at = builder.add(v.times(tile, _TILE_BYTES), v.times(within, VECTOR_BYTES))
                    v.store(builder.load(total), builder.add(sums, at))
        return context.get_dummy_value()

    @intrinsic
    def multiply(typing_context: Any, block: Any, row_bytes: Any, x: Any, tile_row: Any, steps: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return multiply


def _widening() -> Any:
    """numba's `widen(source, vectors, target)`: numbers in bfloat16 as float32."""
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    @intrinsic
    def widen(typing_context: Any, source: Any, vectors: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v = Vectors(builder)
            with cgutils.for_range(builder, arguments[1]) as loop:
                numbers = v.load(builder.add(arguments[0], v.times(loop.index, 2 * LANES)), v.of(v.int16), 2)
                v.store(v.widened(numbers), builder.add(arguments[2], v.times(loop.index, VECTOR_BYTES)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return widen


def _putting() -> tuple[Any, Any]:
    """numba's `turn(sums)`, the transpose of a tile in place, and `put(sums, target)`, a row rounded to bfloat16."""
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def turn(typing_context: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = Vectors(builder)
            places = [builder.add(arguments[0], vectors.number(VECTOR_BYTES * row)) for row in range(TILE_ROWS)]
            made = _turned(vectors, [vectors.load(place, vectors.floats) for place in places])
            for place, vector in zip(places, made, strict=True):
                vectors.store(vector, place)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @intrinsic
    def put(typing_context: Any, sums: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = Vectors(builder)
            vectors.store(vectors.bfloat16(vectors.load(arguments[0], vectors.floats)), arguments[1], 2)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return turn, put


def _configuring() -> tuple[Any, Any]:
    """numba's `configure(address)` and `release()` of a thread's tiles; nothing without AMX."""
    import numba
    from numba.core import types
    from numba.extending import intrinsic

    if not cpu_has_tiles():
        return numba.njit(lambda address: None), numba.njit(lambda: None)

    @intrinsic
    def configure(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = Vectors(builder)
            byte = vectors.int8.as_pointer()
            function = vectors.function("llvm.x86.ldtilecfg", vectors.ir.VoidType(), byte)
            builder.call(function, [builder.inttoptr(arguments[0], byte)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @intrinsic
    def release(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = Vectors(builder)
            builder.call(vectors.function("llvm.x86.tilerelease", vectors.ir.VoidType()), [])
            return context.get_dummy_value()

        return types.void(), generate

    return configure, release
