"""Tables of other programs (CSV, TSV, JSON, JSON lines, Parquet), read by the meaning of their columns.

The meaning of a column is one of `FIELDS`. `--map layer=l,expert=e` assigns columns by name or, in a file without a
header, by number from 1. Columns with a name known to `FIELDS` need no mapping.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.errors import MismatchError, UsageError, first_line, unknown_name
from moetool.trace.foreign.file_sample import FileSample, is_gzip, read_head, read_whole

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = {
    "layer": "layer layer_id layer_idx layer_index moe_layer l",
    "expert": "expert expert_id expert_idx experts expert_ids selected_experts topk_ids e",
    "token": "token token_idx token_index token_position position pos token_pos",
    "request": "request request_id sequence sequence_id seq seq_id prompt_id problem_id conversation",
    "weight": "weight weights topk_weights gating_probs gate gates prob probs score scores",
    "rank": "rank slot topk_rank",
    "phase": "phase",
    "token_id": "token_id input_id",
    "task": "task dataset domain category label",
    "count": "count counts hits activations frequency freq num_tokens",
    "time": "time timestamp date day hour minute window iteration step training_step pass epoch",
}
"""Meanings of columns, and their known names (case-insensitive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedColumns:
    """A file by the meaning of its columns.

    Attributes:
        names: column of each field that has one.
        blank_rows: rows without a layer and what else is needed, which are left out.
    """

    table: "pa.Table"
    names: Mapping[str, str]
    blank_rows: int = 0

    @property
    def used(self) -> str:
        """Return the mapping in the form of --map, for the provenance."""
        return ",".join(f"{field}={name}" for field, name in self.names.items())

    @property
    def notes(self) -> list[str]:
        """Return notes on how the file was read."""
        left_out = f"{self.blank_rows:,} rows without layer and expert (metadata or blank) left out"
        return [f"columns were read as {self.used}", *([left_out] if self.blank_rows else [])]


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--map`. Raises: UsageError: a value is not field=column, or names an unknown field."""
    found: dict[str, str] = {}
    for part in ",".join(texts).split(",") if texts else []:
        field, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or not column:
            raise UsageError(f"--map {part!r}: expected field=column, as in layer=l,expert=e")
        field = next((name for name, known in FIELDS.items() if field in (name, *known.split())), field)
        if field not in FIELDS:
            raise unknown_name("field of --map", field, FIELDS)
        if field in found:
            raise UsageError(f"--map gives {field} twice ({found[field]} and {column}); give it once")
        found[field] = column
    return found


def match(columns: Sequence[str], said: Mapping[str, str]) -> dict[str, str]:
    """Return the column of each field: as mapped, or by the names of `FIELDS`.

    Raises:
        UsageError: a mapped column does not exist.
    """
    names = {}
    for field, column in said.items():
        if column not in columns and column.isdigit() and 1 <= int(column) <= len(columns):
            column = columns[int(column) - 1]
        if column not in columns:
            raise UsageError(f"--map {field}={column}: no such column; there are {', '.join(columns)}")
        names[field] = column
    folded = {column.casefold(): column for column in reversed(columns) if column not in names.values()}
    for field, known in FIELDS.items():
        if field not in names and (found := next((folded[name] for name in known.split() if name in folded), None)):
            names[field] = found
            folded = {name: column for name, column in folded.items() if column != found}
    return names


def read(path: Path, said: Mapping[str, str], needs: Sequence[str] = ("layer", "expert")) -> MappedColumns:
    """Read a whole file. Rows without a layer and what else is needed, such as a line of metadata, are left out.

    Args:
        needs: fields that must have a column.

    Raises:
        MismatchError: it is damaged, or not a table.
        UsageError: no column is known to be one that is needed.
    """
    import pyarrow.compute as pcompute

    table = read_table(path)
    names = match(table.column_names, said)
    for field in needs:
        if field not in names:
            raise UsageError(
                f"{path} has the columns {', '.join(table.column_names)}, of which none is known to be the {field}; "
                f"name it with --map {field}=COLUMN"
            )
    num_rows = len(table)
    blank = reduce(pcompute.and_, (pcompute.is_null(table[names[field]]) for field in {*needs, "layer"} & names.keys()))
    table = table.filter(pcompute.invert(blank))
    if not len(table):
        raise MismatchError(f"{path} has no rows, expected some; record again")
    return MappedColumns(table=table, names=names, blank_rows=num_rows - len(table))


def times(columns: Sequence[str]) -> list[str]:
    """Return the columns with a name known for the time."""
    return [name for name in columns if name.casefold() in FIELDS["time"].split()]


def column_names(sample: FileSample) -> list[str]:
    """Return the columns of a file, from its beginning if possible; none if it is not a table."""
    if sample.parquet is not None:
        return list(sample.parquet.names)
    if sample.first_object:
        return list(dict.fromkeys([*sample.first_object, *_keys_of(sample.lines[1:2])]))  # the first may be metadata
    first = sample.lines[0] if sample.lines else ""
    cells = re.split(_separator(first), first)
    return [] if _is_numeric(cells) else [cell.strip().strip('"') for cell in cells]


def _keys_of(lines: Sequence[str]) -> list[str]:
    try:
        found = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return []
    return [key for one in found if isinstance(one, dict) for key in one]


def _separator(line: str) -> str:
    return max(("\t", ",", ";"), key=line.count)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\s*-?\d+(\.\d+)?([eE][-+]?\d+)?\s*", cell) for cell in cells)


def read_table(path: Path) -> "pa.Table":
    """Read a whole table. Raises: MismatchError: it is damaged, or not a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    head = read_head(path, 1 << 16)
    try:
        if head[:4] == b"PAR1":
            return pq.read_table(path)
        first = next((line for line in head.decode("utf-8-sig", "ignore").splitlines() if line.strip()), "")
        if first.lstrip()[:1] == "[":
            return pa.Table.from_pylist(_objects(path, json.loads(read_whole(path))))
        source = pa.BufferReader(read_whole(path)) if is_gzip(path) else path
        return _json_lines(path, source) if first.lstrip()[:1] == "{" else _delimited(source, first)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        raise MismatchError(
            f"{path} is not a complete table ({first_line(error)[:200]}); correct it, or download it again"
        ) from None


def _json_lines(path: Path, source: Any) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.json as pj

    try:
        whole = json.loads(read_whole(path))
    except ValueError:
        return pj.read_json(source)
    # One object: its columns as lists, or a single row.
    if isinstance(whole, dict) and whole and all(isinstance(values, list) for values in whole.values()):
        return pa.table(whole)
    return pa.Table.from_pylist(_objects(path, [whole]))


def _objects(path: Path, whole: Any) -> list[dict[str, Any]]:
    if not isinstance(whole, list) or not all(isinstance(row, dict) for row in whole):
        raise MismatchError(f"{path} is JSON without a list of objects, expected one object for each row")
    return whole


def _delimited(source: Any, first: str) -> "pa.Table":
    import pyarrow.csv as pc

    separator = _separator(first)
    cells = first.split(separator)
    return pc.read_csv(
        source,
        read_options=pc.ReadOptions(
            column_names=[str(i) for i in range(1, len(cells) + 1)] if _is_numeric(cells) else None
        ),
        parse_options=pc.ParseOptions(delimiter=separator),
    )


def whole_numbers(path: Path, name: str, column: "pa.ChunkedArray") -> np.ndarray:
    """Return a column of whole numbers from 0 as int64. Raises: MismatchError: it has other values or empty cells."""
    import pyarrow as pa

    if column.null_count:
        raise MismatchError(f"{path} has {column.null_count:,} empty cells in {name}, expected a number in each")
    try:
        found: np.ndarray = column.cast(pa.int64()).to_numpy()
    except (pa.ArrowException, ValueError) as error:
        raise MismatchError(
            f"{path} has values in {name} that are not whole numbers ({first_line(error)[:100]})"
        ) from None
    if len(found) and not 0 <= found.min() <= found.max() < 2**31:
        wrong = found.min() if found.min() < 0 else found.max()
        raise MismatchError(f"{path} has the {name} {wrong}, expected numbers from 0 to {2**31 - 1:,}")
    return found


def numbers(path: Path, name: str, column: "pa.ChunkedArray") -> np.ndarray:
    """Return a column of numbers as float32. Raises: MismatchError: it has other values or empty cells."""
    import pyarrow as pa

    try:
        found: np.ndarray = column.cast(pa.float32()).to_numpy()
    except (pa.ArrowException, ValueError) as error:
        raise MismatchError(f"{path} has values in {name} that are not numbers ({first_line(error)[:100]})") from None
    if column.null_count:
        raise MismatchError(f"{path} has {column.null_count:,} empty cells in {name}, expected a number in each")
    return found


def labels(column: "pa.ChunkedArray") -> tuple[np.ndarray, list[str]]:
    """Return a column as indices into its distinct values, by first appearance, and the values as text."""
    import pyarrow as pa

    coded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    found: np.ndarray = coded.indices.to_numpy()
    return found.astype(np.int64), coded.dictionary.to_pylist()


def is_text(column: "pa.ChunkedArray") -> bool:
    """Return whether a column holds text, which has no order but that of its rows."""
    import pyarrow as pa

    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def lists(path: Path, name: str, column: "pa.ChunkedArray") -> tuple[np.ndarray, "pa.ChunkedArray"] | None:
    """Return elements per row, and all elements, of a column of lists or of text such as `[3, 5]` or `3 5`.

    None for a column of single numbers.

    Raises:
        MismatchError: a cell of text is not a list of numbers.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        whole = column.combine_chunks()
        if isinstance(whole, pa.ChunkedArray):
            whole = pa.concat_arrays(whole.chunks)
        import pyarrow.compute as pcompute

        sizes: np.ndarray = pcompute.list_value_length(whole).fill_null(0).to_numpy(zero_copy_only=False)
        return sizes.astype(np.int64), pa.chunked_array([whole.flatten()])
    if not is_text(column):
        return None
    cells = [re.findall(r"[^\s,;|\[\]()]+", text or "") for text in column.to_pylist()]
    try:
        values = np.array([float(value) for cell in cells for value in cell])
    except ValueError as error:
        raise MismatchError(f"{path} has {name} that are not lists of numbers ({error})") from None
    return np.array([len(cell) for cell in cells], np.int64), pa.chunked_array([pa.array(values)])
