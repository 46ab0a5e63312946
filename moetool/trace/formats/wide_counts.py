"""Wide tables of counts: a row for each layer and a column for each expert, or a row for each expert and a column for
each layer, such as `layer,expert_0,expert_1,...` or `expert,layer_1,layer_2,...`.

CSV, TSV, JSON, JSON lines or Parquet. The columns are named by their numbers, with or without a word before them. With
a column for the time, each time is a pass.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign import column_table
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.formats import column_counts

GENERIC = True
_OTHER = {"layer": "expert", "expert": "layer"}


def recognize(sample: FileSample) -> str | None:
    """Recognize a column for the layer and numbered ones for experts, or the reverse."""
    field, numbered = _shape(column_table.column_names(sample))
    return f"a table of counts by {field} with {len(numbered)} columns of {_OTHER[field]}s" if numbered else None


def _shape(columns: Sequence[str]) -> tuple[str, dict[int, str]]:
    """Return the field of the rows, and the numbered column of each member of the other; none if it is not so."""
    names = column_table.match(columns, {})
    for field, other in _OTHER.items():
        words = column_table.FIELDS[other].replace(" ", "|")
        pattern = re.compile(rf"(?:(?:{words})[ _.-]?)?(\d{{1,6}})", re.IGNORECASE)
        numbered = {int(found[1]): one for one in columns if (found := pattern.fullmatch(one.strip()))}
        if field in names and other not in names and "count" not in names and len(numbered) > 1:
            return field, numbered
    return "layer", {}


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the counts of each file, or of each time in it, as a pass.

    Raises:
        MismatchError: a file is damaged or of another shape, or has a row twice.
        UsageError: a fact about the model is neither in the files nor given.
    """
    found: list[np.ndarray] = []
    notes = []
    for path in paths:
        table = column_table.read_table(path)
        field, numbered = _shape(table.column_names)
        if not numbered:
            raise MismatchError(f"{path} has the columns {', '.join(table.column_names)[:80]}, expected numbered ones")
        names = column_table.match(table.column_names, {})
        row_R = column_table.whole_numbers(path, names[field], table[names[field]])
        counts_RX = np.stack(
            [column_table.whole_numbers(path, name, table[name]) for name in numbered.values()], axis=1
        )
        parts = {
            field: np.repeat(row_R, len(numbered)),
            _OTHER[field]: np.tile(np.array(list(numbered)), len(row_R)),
            "count": counts_RX.reshape(-1),
        }
        rows_R3 = np.stack([parts[name] for name in ("layer", "expert", "count")], axis=1)
        time_R = None if "time" not in names else table[names["time"]]
        found += column_counts.passes(path, rows_R3, time_R, len(numbered)).values()
        notes.append(f"{path.name}: a row for each {field}, a column for each {_OTHER[field]}")
    return column_counts.counted(paths, found, facts, notes)
