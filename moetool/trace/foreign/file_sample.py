"""The beginning of a file, read once for detection by every format; and the reader of numeric CSV files."""

import gzip
import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, first_line

_HEAD_BYTES = 1 << 16
_HEAD_LINES = 200
PARSED_BYTES = 1 << 26
"""Most bytes of a file that detection parses."""
_GZIP = b"\x1f\x8b"
_MOST_BYTES = 1 << 32
"""Limit of a decompressed file: a small one can hold far more than memory."""


def read_head(path: Path, num_bytes: int) -> bytes:
    """Return the first bytes of a file, decompressed if it is gzip.

    Raises:
        MismatchError: the compressed file is damaged.
    """
    with path.open("rb") as file:
        head = file.read(num_bytes)
    return _unpacked(path, num_bytes) if head[:2] == _GZIP else head


def read_whole(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzip.

    Raises:
        MismatchError: the compressed file is damaged or holds too much.
    """
    if not is_gzip(path):
        return path.read_bytes()
    if len(found := _unpacked(path, _MOST_BYTES + 1)) > _MOST_BYTES:
        raise MismatchError(f"{path} holds more than {_MOST_BYTES:,} bytes; unpack it with gunzip")
    return found


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def _unpacked(path: Path, most: int) -> bytes:
    try:
        with gzip.open(path) as packed:
            return packed.read(most)
    except (OSError, EOFError, zlib.error) as error:
        raise MismatchError(f"{path} is not a complete gzip file ({first_line(error)}); download it again") from None


def read_objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return every JSON object of a file (one, a list, or one per line), with its place for messages.

    Raises:
        MismatchError: the file is not text, or not JSON; the error names the line.
    """
    try:
        text = read_whole(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MismatchError(f"{path} is not text ({error.reason}), expected JSON objects") from None
    try:
        whole = json.loads(text)
        every = whole if isinstance(whole, list) else [whole]
        found = [(f"{path}, object {i}", one) for i, one in enumerate(every)]
    except (ValueError, RecursionError):
        found = []
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    found.append((f"{path}, line {i}", json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise MismatchError(f"{path}, line {i} is not JSON ({error}); the file is cut off") from None
    for where, one in found:
        if not isinstance(one, dict):
            raise MismatchError(f"{where} is {str(one)[:40]!r}, expected a JSON object")
    if not found:
        raise MismatchError(f"{path} has no object, expected some; download it again")
    return found


@dataclass(frozen=True)
class FileSample:
    """A file or folder of unknown format."""

    path: Path

    @cached_property
    def head(self) -> bytes:
        """Return the first bytes, decompressed if they are gzip; none for a folder."""
        if not self.path.is_file():
            return b""
        try:
            return read_head(self.path, _HEAD_BYTES)
        except MismatchError:
            return b""

    @cached_property
    def lines(self) -> list[str]:
        """Return the first complete nonblank lines; none if the file is not text."""
        try:
            text = self.head.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if len(self.head) < _HEAD_BYTES or error.start < _HEAD_BYTES - 4:
                return []
            text = self.head[: error.start].decode("utf-8-sig")
        if "\0" in text:
            return []
        lines = text.splitlines()
        whole = lines if len(self.head) < _HEAD_BYTES else lines[:-1]
        return [line for line in whole if line.strip()][:_HEAD_LINES]

    @cached_property
    def first_object(self) -> dict[str, Any]:
        """Return the first JSON object of JSON lines, of a JSON list or of the file; empty without one."""
        found: Any = None
        if self.lines:
            try:
                found = json.loads(self.lines[0])
            except (ValueError, RecursionError):
                found = None
        if found is None and self.head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):
            try:
                text = read_head(self.path, PARSED_BYTES).decode("utf-8-sig", "ignore").lstrip()
                found = json.JSONDecoder().raw_decode(text)[0]
            except (ValueError, RecursionError):
                found = None
        if isinstance(found, list):
            found = found[0] if found else None
        return found if isinstance(found, dict) else {}

    @cached_property
    def parquet(self) -> Any:
        """Return the Arrow schema of a Parquet file, or None."""
        if self.head[:4] != b"PAR1":
            return None
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.read_schema(self.path)
        except (pa.ArrowException, OSError):
            return None

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """Return the dictionary of a `.pt` file; empty for other files."""
        if self.head[:4] != b"PK\x03\x04":
            return {}
        from moetool.trace.foreign import torch_file

        try:
            return torch_file.load(self.path)
        except MismatchError:
            return {}

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """Return the arrays of a `.npy`, `.npz`, `.safetensors` or `.pt` file by name; empty for other files."""
        from moetool.trace.foreign import array_file

        if not array_file.is_array_file(self.head):
            return {}
        try:
            return array_file.load(self.path)
        except MismatchError:
            return {}


def read_numbers(path: Path, width: int, names: str, *, negative_first: bool = False) -> np.ndarray:
    """Read a CSV file of whole numbers from 0 without a header: int64 [rows, width].

    Args:
        negative_first: whether the first column may be below 0.

    Raises:
        MismatchError: the file is not such a CSV file.
    """
    import pyarrow as pa
    import pyarrow.csv as pc

    columns = [str(i) for i in range(width)]
    try:
        table = pc.read_csv(
            path,
            read_options=pc.ReadOptions(column_names=columns),
            convert_options=pc.ConvertOptions(column_types=dict.fromkeys(columns, pa.int64())),
        )
    except (pa.ArrowException, OSError) as error:
        raise MismatchError(
            f"{path} is not a CSV of {names} ({first_line(error)}); it is cut off, damaged or of another format"
        ) from None
    if not len(table):
        raise MismatchError(f"{path} has no rows, expected {names}; record again")
    if any(column.null_count for column in table.columns):
        raise MismatchError(f"{path} has empty cells, expected {names} in each row; record again")
    numbers: np.ndarray = np.stack([column.to_numpy() for column in table.columns], axis=1)
    if (low := numbers[:, int(negative_first) :].min()) < 0 or np.abs(numbers).max() >= 2**31:
        raise MismatchError(
            f"{path} has the number {low if low < 0 else numbers.max()}, expected {names} from 0; record again"
        )
    return numbers
