"""Numbers of each kind of weight as vectors of float32."""

from typing import Any

from moetool.kernels.cpu.ggml_numbers import block_numbers
from moetool.kernels.cpu.kinds import BFLOAT16, FP8, INT8, VECTOR_BYTES, RowKind
from moetool.kernels.cpu.vectors import LANES, Vectors

_RUN = 32  # numbers unpacked at a time, if blocks contain no scales


def planes(vectors: Vectors, kind: RowKind, address: Any) -> list[Any]:
    """Numbers of a block: the first of each word, then the second of each, and so on."""
    builder = vectors.builder
    if kind.ggml is not None:
        return block_numbers(vectors, kind.ggml, address)
    if kind is FP8:
        words = vectors.load(address, vectors.of(vectors.int16, 2 * LANES))
        made = []
        for shifted in (builder.shl(words, vectors.all(vectors.int16, 8, 2 * LANES)), words):
            halves = vectors.halves(shifted)
            for first in (0, LANES):
                part = vectors.shuffled(halves, [*range(first, first + LANES)])
                made.append(builder.fpext(part, vectors.floats))
        return made
    words = vectors.load(address, vectors.words)
    if kind is BFLOAT16:
        low = builder.shl(words, vectors.all(vectors.int32, 16))
        high = builder.and_(words, vectors.all(vectors.int32, 0xFFFF0000 - 2**32))
        return [builder.bitcast(bits, vectors.floats) for bits in (low, high)]
    if kind is INT8:
        shifted = [builder.shl(words, vectors.all(vectors.int32, 24 - 8 * byte)) for byte in range(4)]
        numbers = [builder.ashr(each, vectors.all(vectors.int32, 24)) for each in shifted]
        return [builder.sitofp(each, vectors.floats) for each in numbers]
    return [vectors.e2m1(builder.lshr(words, vectors.all(vectors.int32, 4 * n))) for n in range(8)]


def byte_scales(vectors: Vectors, kind: RowKind, address: Any, count: int) -> Any:
    """One-byte scales as float32: powers of two, or FP8 numbers times 2**-8."""
    builder, stored = vectors.builder, vectors.load(address, vectors.of(vectors.int8, count), 1)
    if kind.scale == "exponent":
        return vectors.powers(stored)
    wide = builder.shl(builder.zext(stored, vectors.of(vectors.int16, count)), vectors.all(vectors.int16, 8, count))
    return builder.fpext(vectors.halves(wide), vectors.of(vectors.float32, count))


def run_length(kind: RowKind) -> int:
    """Numbers that `run` returns."""
    return kind.numbers if kind.ggml is not None else _RUN


def run(vectors: Vectors, kind: RowKind, address: Any) -> list[Any]:
    """Numbers in their order in the weight."""
    if kind.ggml is not None:
        return block_numbers(vectors, kind.ggml, address)
    builder = vectors.builder
    stored = vectors.load(address, vectors.of(vectors.int8, _RUN * VECTOR_BYTES // kind.numbers), 1)
    if kind.ways == 8:
        made = []
        for first in range(0, _RUN, LANES):
            wide = builder.zext(vectors.shuffled(stored, [(first + lane) // 2 for lane in range(LANES)]), vectors.words)
            halves = vectors.ir.Constant(vectors.words, [lane % 2 * 4 for lane in range(LANES)])
            made.append(vectors.e2m1(builder.lshr(wide, halves)))
        return made
    parts = [vectors.shuffled(stored, [*range(first, first + LANES)]) for first in range(0, _RUN, LANES)]
    if kind is INT8:
        return [builder.sitofp(builder.sext(part, vectors.words), vectors.floats) for part in parts]
    wide = [builder.zext(part, vectors.of(vectors.int16)) for part in parts]
    shifted = [builder.shl(part, vectors.all(vectors.int16, 8)) for part in wide]
    return [builder.fpext(vectors.halves(part), vectors.floats) for part in shifted]
