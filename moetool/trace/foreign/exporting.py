"""Export of a trace or counts to the files of other programs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import durable, plugins
from moetool.base.errors import MismatchError, UsageError, unknown_name
from moetool.trace.expert_counts import Counted, ExpertCounts, count_experts, open_workload
from moetool.trace.foreign.importing import formats_with
from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes:
        out: the file, or the folder of files.
        notes: data that the format cannot hold, and values in the file that the trace lacks.
    """

    out: Path
    bytes: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}


def export_trace(
    path: Path, format: str, out: Path, *, num_hidden_layers: int | None = None, overwrite: bool = False
) -> Exported:
    """Write a trace or counts in a foreign format. In a format of counts, a trace is counted forward by forward.

    Args:
        format: one of `formats_with("write_routes", "write_counts")`, or the dotted name of such a module.
        num_hidden_layers: number of layers with and without experts; required if the last layer has no experts.

    Effects: writes `out` whole or not at all.

    Raises:
        UsageError: there is no such trace or format, `out` exists, or the input has counts and the format needs routes.
        MismatchError: the trace is damaged, or the format cannot hold it.
    """
    writer = plugins.load("format", format)
    if not (hasattr(writer, "write_routes") or hasattr(writer, "write_counts")):
        raise unknown_name("format of routes", format, formats_with("write_routes", "write_counts"))
    mark: str | None = getattr(writer, "FOLDER_MARK", None)
    durable.require_absent(out, overwrite, mark)
    if mark is None:
        durable.require_writable(out)
    source = open_workload(path)
    if isinstance(source, ExpertCounts) and not hasattr(writer, "write_counts"):
        raise UsageError(f"{path} holds counts, not routes; export to one of {', '.join(formats_with('write_counts'))}")
    counts = isinstance(source, ExpertCounts) or not hasattr(writer, "write_routes")
    write = writer.write_counts if counts else writer.write_routes
    given = _counted(source) if counts else source
    if mark is None:
        with durable.staged_file(out) as staged:
            notes = write(given, staged, num_hidden_layers)
        num_bytes = out.stat().st_size
    else:
        with durable.staged_directory(out, overwrite, mark) as folder:
            notes = write(given, folder, num_hidden_layers)
        num_bytes = sum(file.stat().st_size for file in out.iterdir())
    return Exported(out=out, bytes=num_bytes, notes=list(notes))


def _counted(source: Trace | ExpertCounts) -> Counted:
    """Return counts by pass; for a trace, by forward."""
    if isinstance(source, ExpertCounts):
        return Counted(spec=source.spec, counts_WLE=source.counts_WLE)
    passes = [count_experts(source.spec, rows.experts_TS).astype(np.int64) for rows in source.recorded_forwards([])]
    if not passes:
        raise MismatchError(f"{source.path} has no tokens, expected some; capture again")
    return Counted(spec=source.spec, counts_WLE=np.stack(passes))
