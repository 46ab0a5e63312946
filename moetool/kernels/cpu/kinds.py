"""Kinds of stored weights that kernels for few rows read."""

from dataclasses import dataclass, replace

VECTOR_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class RowKind:
    """A kind of weight.

    Attributes:
        name: name of the number format.
        numbers: numbers in a block, the kernel's unit.
        ways: numbers per word of the block.
        chains: accumulators of a row that hide the latency of an addition.
        unroll: blocks at a time.
        rows: numbers of rows of x that one pass over a row of the weight can multiply, largest first.
        scale: `none`; `float32`, for blocks of rows and columns; `exponent`, a byte per 32 numbers of a row;
            `float8`, a float32 per row, then a byte per 16 numbers; `own`: blocks contain their scales.
        one: bytes that, repeated, encode ones.
        factor: factor on float32 scales, because of how the kernel reads numbers.
        ggml: ggml type of the blocks; None for other formats.
        divides: whether a row's scale divides the others.
        paired: whether x is in bfloat16, and pairs of numbers are multiplied at once (`avx512_bf16`).
    """

    name: str
    numbers: int
    ways: int
    chains: int
    unroll: int
    rows: tuple[int, ...]
    scale: str
    one: bytes
    block_bytes: int = VECTOR_BYTES
    factor: float = 1.0
    ggml: int | None = None
    divides: bool = False
    paired: bool = False

    @property
    def words(self) -> int:
        return self.numbers // self.ways

    @property
    def has_scales(self) -> bool:
        """Whether its scales are stored apart from its numbers."""
        return self.scale in ("float32", "exponent", "float8")

    @property
    def scales_a_block(self) -> int:
        """Bytes of a row's scales per block; 0 if its scales belong to blocks of another size."""
        return {"exponent": self.numbers // 32, "float8": self.numbers // 16}.get(self.scale, 0)

    def row_bytes(self, columns: int) -> int:
        """Bytes of this number of values."""
        return columns * self.block_bytes // self.numbers


BFLOAT16 = RowKind("bfloat16", 32, 2, chains=4, unroll=2, rows=(2, 1), scale="none", one=b"\x80\x3f")
BFLOAT16_COLUMNS = RowKind(
    "bfloat16_columns", 16, 1, chains=1, unroll=1, rows=(2, 1), scale="none", one=b"\x80\x3f", block_bytes=32
)
"""Stored [in, out] instead of [out, in] (`moetool.kernels.cpu.columns`)."""
FP8 = RowKind("fp8", 64, 2, chains=2, unroll=1, rows=(4, 2, 1), scale="float32", one=b"\x38", factor=2.0**8)
INT8 = RowKind("int8", 64, 4, chains=2, unroll=1, rows=(4, 2, 1), scale="float32", one=b"\x01")
MXFP4 = RowKind("mxfp4", 128, 8, chains=2, unroll=1, rows=(4, 2, 1), scale="exponent", one=b"\x22")
NVFP4 = RowKind("nvfp4", 128, 8, chains=2, unroll=1, rows=(4, 2, 1), scale="float8", one=b"\x22", factor=2.0**8)
NVFP4_DIVIDED = replace(NVFP4, name="nvfp4_divided", factor=2.0**-8, divides=True)


def _blocks(name: str, ggml: int, numbers: int, one: bytes) -> RowKind:
    """A type of ggml's blocks, with the bytes of a block of ones."""
    rows, size = (4, 2, 1), len(one)
    return RowKind(name, numbers, 1, chains=2, unroll=1, rows=rows, scale="own", one=one, block_bytes=size, ggml=ggml)


_ONE, _ZERO, _EIGHT = b"\x00\x3c", b"\x00\x00", b"\x00\x48"  # in float16
_SIXES = b"\x01" * 4 + b"\x00" * 4 + b"\x01" * 4  # eight scales of 1 and eight minima of 0
GGML_KINDS = (
    _blocks("q4_0", 2, 32, _ONE + b"\x99" * 16),
    _blocks("q4_1", 3, 32, _ONE + _ZERO + b"\x11" * 16),
    _blocks("q5_0", 6, 32, _ONE + b"\xff" * 4 + b"\x11" * 16),
    _blocks("q5_1", 7, 32, _ONE + _ZERO + b"\x00" * 4 + b"\x11" * 16),
    _blocks("q8_0", 8, 32, _ONE + b"\x01" * 32),
    _blocks("q2_k", 10, 256, b"\x01" * 16 + b"\x55" * 64 + _ONE + _ZERO),
    _blocks("q3_k", 11, 256, b"\xff" * 32 + b"\x55" * 64 + b"\x11" * 8 + b"\xaa" * 4 + _ONE),
    _blocks("q4_k", 12, 256, _ONE + _ZERO + _SIXES + b"\x11" * 128),
    _blocks("q5_k", 13, 256, _ONE + _ZERO + _SIXES + b"\x00" * 32 + b"\x11" * 128),
    _blocks("q6_k", 14, 256, b"\x11" * 128 + b"\xaa" * 64 + b"\x01" * 16 + _ONE),
    _blocks("iq4_nl", 20, 32, _ONE + b"\x88" * 16),
    _blocks("iq4_xs", 23, 256, _ONE + b"\xaa" * 2 + b"\x11" * 4 + b"\x88" * 128),
    # a scale of 8 times the 0.125 that IQ1 adds to each number, here to those of an entry of eight zeros
    _blocks("iq1_s", 19, 256, _EIGHT + b"\x05" * 32 + b"\x24\x09" * 8),
    _blocks("iq1_m", 29, 256, b"\x05" * 32 + b"\x44" * 16 + b"\x00\x00\x00\x00\x00\x80\x00\x40"),
    _blocks("iq2_xxs", 16, 256, _ONE + b"\x00" * 64),
    _blocks("iq2_xs", 17, 256, _ONE + b"\x00" * 72),
    _blocks("iq2_s", 22, 256, _ONE + b"\x00" * 80),
    _blocks("iq3_xxs", 18, 256, _ONE + b"\x00" * 96),
    _blocks("iq3_s", 21, 256, _ONE + b"\x00" * 108),
    _blocks("tq1_0", 34, 256, b"\xff" * 52 + _ONE),
    _blocks("tq2_0", 35, 256, b"\xaa" * 64 + _ONE),
    _blocks("mxfp4_blocks", 39, 32, b"\x7f" + b"\x22" * 16),
)
