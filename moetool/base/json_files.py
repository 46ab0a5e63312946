"""JSON: dataclasses as objects, and bounded reading of untrusted files, with errors that name the file."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moetool.base.bounded_read import read_bytes, require_depth
from moetool.base.errors import MismatchError, first_line, shortened

MAX_BYTES = 256 << 20
_MAX_DEPTH = 100


class JsonRecord:
    """A dataclass with a JSON object of its fields."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)  # type: ignore[call-overload]


def parse_object(content: bytes, *, constants: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: text in UTF-8.
        constants: whether to allow NaN and Infinity, which Python writes but JSON lacks, and whole numbers of any size.

    Raises:
        ValueError: the content is not a JSON object, has a key twice or a number that is too large, or is nested more
            than 100 levels deep.
    """
    try:
        values = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=None if constants else _refuse_constant,
            parse_float=None if constants else _finite,
            parse_int=None if constants else _whole,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels") from None
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    require_depth(values, _MAX_DEPTH)
    return values


def read_json(path: Path, *, advice: str, constants: bool = False, max_bytes: int | None = None) -> dict[str, Any]:
    """Read the JSON object of a file.

    Args:
        advice: next command, for messages.
        constants: as in `parse_object`.

    Raises:
        MismatchError: the file is too large, is not a JSON object, or has a key twice.
        OSError: the file cannot be read.
    """
    return decode_json(path, read_bounded(path, advice=advice, max_bytes=max_bytes), advice=advice, constants=constants)


def read_bounded(path: Path, *, advice: str, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a file. Raises: MismatchError if it is too large or not a regular file; OSError."""
    try:
        return read_bytes(path, MAX_BYTES if max_bytes is None else max_bytes)
    except ValueError as error:
        raise MismatchError(f"{path} is damaged ({error}); {advice}") from None


def decode_json(path: Path, content: bytes, *, advice: str, constants: bool = False) -> dict[str, Any]:
    """Parse the JSON object in a file's content; arguments and errors as in `read_json`."""
    try:
        return parse_object(content, constants=constants)
    except ValueError as error:  # includes the errors of the JSON and UTF-8 decoders
        raise MismatchError(f"{path} is damaged ({first_line(error)}); {advice}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has {twice!r} twice")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{shortened(text, 20)} is too large for a number")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"{shortened(text, 20)} is too large for a number")
    return value
