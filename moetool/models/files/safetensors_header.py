"""Read the header of a safetensors file, with all checks of the safetensors library.

Source: https://github.com/huggingface/safetensors, `Metadata::validate` and `SafeTensors::read_metadata`.
Deviations: duplicate keys and tensors described by an array are refused, which serde accepts; -0 is read as 0.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from moetool.base.bounded_read import open_regular
from moetool.base.errors import MismatchError, first_line
from moetool.base.json_files import parse_object

DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_MAX_HEADER_BYTES = 100_000_000
_MAX_INTEGER = 2**64 - 1


class HeaderEntry(NamedTuple):
    """A tensor by its header: `begin` and `end` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file, in the order of its bytes.

    Raises:
        MismatchError: it is not a safetensors file, is truncated, or its tensors overlap, leave gaps, or contradict
            data type and shape in size.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            content = stream.read(min(length, _MAX_HEADER_BYTES))
            if 8 + length > size and content[:1] in (b"", b"{"):
                raise ValueError(f"it is truncated inside its header: it has {size:,} bytes")
            if length > _MAX_HEADER_BYTES or 8 + length > size:
                raise ValueError(f"its header should have {length:,} bytes, but the file has {size:,}")
            header = parse_object(content)
        return parse_header(header, 8 + length, size)
    except ValueError as error:
        raise MismatchError(f"{file} is damaged: {first_line(error)}; download the model again") from None


def parse_header(header: dict[str, Any], base: int, size: int) -> dict[str, HeaderEntry]:
    """Parse the tensors of a header.

    Args:
        base: byte offset of the data in the file.
        size: bytes of the file.

    Raises:
        ValueError: the header is damaged.
    """
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise ValueError("its __metadata__ is not a table of strings")
    "".join([*header, *metadata, *metadata.values()]).encode()  # refuses lone surrogates
    entries = {name: _entry(name, entry, base) for name, entry in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = base
    for name, entry in ordered.items():
        if entry.begin != at or entry.end < entry.begin:
            raise ValueError(
                f"{name} has bytes {entry.begin:,} to {entry.end:,}, expected them to begin at {at:,}, "
                "the end of the previous tensor"
            )
        at = entry.end
    if at > size:
        raise ValueError(f"it is truncated: {size:,} bytes, expected {at:,} for {name}")
    if at < size:
        raise ValueError(f"it has {size:,} bytes, expected {at:,}: the last {size - at:,} belong to no tensor")
    return ordered


def _entry(name: str, entry: Any, base: int) -> HeaderEntry:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} has no description")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ValueError(f"{name} has the data type {dtype!r}, which safetensors does not know")
    if not (_whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2):
        raise ValueError(f"{name} has shape {shape!r} and data_offsets {offsets!r}, expected whole numbers, 0 or more")
    elements = 1
    for length in shape:
        elements *= length
        if elements * bits > _MAX_INTEGER:
            raise ValueError(f"{name} has the shape {shape}, which no file can hold")
    begin, end = offsets
    if elements * bits % 8 or end - begin != elements * bits // 8:
        raise ValueError(f"{name} has {end - begin:,} bytes, expected {elements * bits / 8:,.0f} for {dtype} {shape}")
    return HeaderEntry(str(dtype), tuple(shape), base + begin, base + end)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= _MAX_INTEGER for v in values)
