"""Any table of counts: a row for each layer and expert with a number of tokens, or a file of experts for each layer.

With a column for the time (a window, a training step), each time is a pass of its own. Columns are identified by name
or `--map` (`moetool.trace.foreign.column_table`). Without a column for the layer, a file is of the layer whose number
its name ends with (`layer_3.csv`), and the files together are one recording.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign import column_table
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts

if TYPE_CHECKING:
    import pyarrow as pa

GENERIC = True
TAKES_MAP = True


def recognize(sample: FileSample) -> str | None:
    """Recognize columns for the layer, the expert and a count; the layer may be in the file's name."""
    names = column_table.match(column_table.column_names(sample), {})
    if not {"expert", "count"} <= names.keys() or ("layer" not in names and _layer_of(sample.path) is None):
        return None
    return f"a table that counts: {', '.join(f'{field} ({name})' for field, name in names.items())}"


def _layer_of(path: Path) -> int | None:
    """Return the number that the name of a file ends with, if it may be a layer's."""
    found = re.fullmatch(r"(?:.*[^\d.])?(\d{1,4})", path.name.removesuffix(".gz").rpartition(".")[0])
    return int(found[1]) if found else None


def read_counts(paths: Sequence[Path], facts: ModelFacts, mapping: Mapping[str, str] | None = None) -> Counted:
    """Return the counts of each file, or of each time in it, as a pass; an expert without a row has 0.

    Raises:
        MismatchError: a file is damaged, or has an expert of a layer twice; or files of layers have unequal times.
        UsageError: a column is unknown, no column or name tells the layer, or the number of experts, top-k or the bytes
            of an expert are not given.
    """
    found: list[np.ndarray] = []
    by_layer: list[dict[str, np.ndarray]] = []
    notes: list[str] = []
    for path in paths:
        mapped = column_table.read(path, mapping or {}, needs=("expert", "count"))
        layer = None if "layer" in mapped.names else _layer_of(path)
        if "layer" not in mapped.names and layer is None:
            raise UsageError(f"{path} has no column known to be the layer; name it with --map layer=COLUMN")
        columns = {
            field: column_table.whole_numbers(path, name, mapped.table[name])
            for field, name in mapped.names.items()
            if field in ("layer", "expert", "count")
        }
        layer_R = columns.get("layer", np.full(len(mapped.table), layer or 0))
        rows_R3 = np.stack([layer_R, columns["expert"], columns["count"]], axis=1)
        time_R = None if "time" not in mapped.names else mapped.table[mapped.names["time"]]
        by_time = passes(path, rows_R3, time_R, known_times=column_table.times(mapped.table.column_names))
        if layer is None:
            found += by_time.values()
        else:
            by_layer.append(by_time)
        notes += [f"{path.name}: {note}" for note in mapped.notes]
    if by_layer:
        if found or any(each.keys() != by_layer[0].keys() for each in by_layer):
            raise MismatchError(f"{paths[0]} and the files beside it have unequal times or columns; import them apart")
        joined = [np.concatenate([each[time] for each in by_layer]) for time in by_layer[0]]
        if any(len(np.unique(rows_R3[:, :2], axis=0)) < len(rows_R3) for rows_R3 in joined):
            raise MismatchError(f"{paths[0]} and the files beside it have a layer twice; import them apart")
        found, notes = joined, ["the layer of each file is the number that its name ends with", *notes]
    return counted(paths, found, facts, notes)


def passes(
    path: Path, rows_R3: np.ndarray, times: "pa.ChunkedArray | None", repeat: int = 1, known_times: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return rows of (layer, expert, count) by the value of a column: by time, or text by its first appearance.

    Args:
        times: column of the time, if there is one.
        repeat: rows for each value of it.
        known_times: columns that may be the time.

    Raises:
        MismatchError: an expert of a layer is in a pass twice.
    """
    time_R, names = (np.zeros(len(rows_R3) // repeat, np.int64), [""]) if times is None else column_table.labels(times)
    time_R = np.repeat(time_R, repeat)
    if len(np.unique(np.column_stack([time_R, rows_R3[:, :2]]), axis=0)) < len(rows_R3):
        remedy = (
            f"combine {' and '.join(known_times)} into one column of the time, or name one with --map time=COLUMN"
            if len(known_times) > 1
            else "is it a table of tokens?"
        )
        raise MismatchError(f"{path} has an expert of a layer twice, expected one row for each; {remedy}")
    order: Sequence[int] = range(len(names))
    if times is not None and not column_table.is_text(times):
        import pyarrow.compute as pc

        order = pc.sort_indices(times.unique()).to_pylist()
    return {names[time]: rows_R3[time_R == time] for time in order}


def counted(paths: Sequence[Path], found: Sequence[np.ndarray], facts: ModelFacts, notes: list[str]) -> Counted:
    """Return the counts of passes, each rows of (layer, expert, count); an expert without a row has 0.

    Raises:
        MismatchError: an expert is not of the given model.
    """
    rows = np.concatenate(found)
    layers = np.unique(rows[:, 0])
    guessed, more = facts.num_experts_or(rows[:, 1])
    num_experts = guessed or facts.said(paths[0], "num_experts")
    if rows[:, 1].max() >= num_experts:
        raise MismatchError(f"{paths[0]} counts expert {rows[:, 1].max()}, expected 0 to {num_experts - 1}")
    top_k_L, unknown = facts.top_k_or_one(len(layers))
    notes += [*more, *unknown]
    spec = facts.spec_of(paths[0], layers=layers.tolist(), num_experts=num_experts, top_k_L=top_k_L)
    counts_WLE = np.zeros((len(found), len(layers), num_experts), np.int64)
    for w, rows_R3 in enumerate(found):
        counts_WLE[w, np.searchsorted(layers, rows_R3[:, 0]), rows_R3[:, 1]] = rows_R3[:, 2]
    return Counted(spec=spec, counts_WLE=counts_WLE, notes=notes)
