"""The beginning of a file, read once for detection by every format; and the reader of numeric CSV files."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, first_line

_HEAD_BYTES = 1 << 16
_HEAD_LINES = 200
_PARSED_BYTES = 1 << 26


@dataclass(frozen=True)
class FileSample:
    """A file or folder of unknown format."""

    path: Path

    @cached_property
    def head(self) -> bytes:
        """Return the first bytes; none for a folder."""
        if not self.path.is_file():
            return b""
        with self.path.open("rb") as file:
            return file.read(_HEAD_BYTES)

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
        try:
            found = json.loads(self.lines[0]) if self.lines else None
        except (ValueError, RecursionError):
            if self.lines and self.lines[0].lstrip()[:1] in "[{" and self.path.stat().st_size <= _PARSED_BYTES:
                try:
                    found = json.loads(self.path.read_bytes())
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
