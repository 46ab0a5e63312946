"""Merging of traces."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moetool.base import durable
from moetool.base.errors import UsageError
from moetool.base.tables import numbered
from moetool.trace.edit import copy_requests, part_writer, request_numbers
from moetool.trace.reader import MANIFEST, Trace


def merge(traces: Sequence[Trace], out: Path, *, overwrite: bool = False) -> tuple[Trace, list[str]]:
    """Write several traces of one model as one, requests in the order of the traces and renumbered.

    Columns that a trace lacks are left out. The provenance includes that of each trace.

    Returns:
        The trace, and one sentence for each omission or caveat.

    Effects: writes `out`, whole or not at all.

    Raises:
        UsageError: fewer than two traces, one of them twice, or `out` exists.
        MismatchError: the traces are of different models, or one is damaged.
    """
    if len(traces) < 2:
        raise UsageError(f"{len(traces)} trace to merge, expected at least two; give their directories")
    first = traces[0]
    seen: dict[str, Path] = {}
    for trace in traces:
        first.spec.require_same(trace.spec, str(first.path), str(trace.path))
        if trace.sha256 in seen:
            raise UsageError(f"{trace.path} is the same trace as {seen[trace.sha256]}; give each once")
        seen[trace.sha256] = trace.path
    columns, notes = _common_columns(traces)
    if again := _prompts_again(traces):
        notes.append(f"{numbered(again, 'prompt')} in more than one of them; a split by request may separate copies")
    durable.require_absent(out, overwrite, MANIFEST)
    with durable.staged_directory(out, overwrite, MANIFEST) as folder, ExitStack() as stack:
        writer = part_writer(stack, folder, first.spec, columns, first)
        forward = number = 0
        merged = []
        for trace in traces:
            there = request_numbers(trace)
            numbers = {request: (writer, number + i) for i, request in enumerate(there)}
            forward = copy_requests(trace, columns, numbers, first_forward=forward)
            merged.append(
                {
                    "sha256": trace.sha256,
                    "first_request": number,
                    "requests": len(there),
                    "composition": trace.manifest["composition"],
                    "provenance": trace.manifest["provenance"],
                }
            )
            number += len(there)
        spelled = {token: text for trace in traces for token, text in trace.vocabulary.items()}
        models = {trace.manifest["provenance"].get("model") for trace in traces} - {None}
        writer.finish(
            composition=_composition(traces),
            provenance={**({"model": min(models)} if len(models) == 1 else {}), "merged": merged, "notes": notes},
            spell=spelled.__getitem__,
        )
    return Trace(out), notes


def _common_columns(traces: Sequence[Trace]) -> tuple[frozenset[str], list[str]]:
    columns = frozenset.intersection(*(trace.columns for trace in traces))
    notes = [f"{name}: not in all of them" for name in sorted(frozenset.union(*(t.columns for t in traces)) - columns)]
    if "ahead" in columns and len({trace.ahead for trace in traces}) > 1:
        columns -= {"ahead"}
        notes.append("ahead: they look different numbers of layers ahead")
    if "resident" in columns and len({trace.resident for trace in traces}) > 1:
        columns -= {"resident"}
        notes.append("resident: different shares of the experts")
    logs = {trace.manifest["composition"]["kind"] == "log" for trace in traces}
    if "embeddings" in columns and len(logs) > 1:
        columns -= {"embeddings"}
        notes.append("embeddings: the log of a server has them by forward, the others by iteration")
    return columns, [f"left out {note}" for note in notes]


def _prompts_again(traces: Sequence[Trace]) -> int:
    """Return the number of prompts in more than one of the traces."""
    found: dict[tuple[str, str, str], int] = {}
    for trace in traces:
        for key in {(row["dataset"], row["task"], row["prompt_id"]) for row in trace.requests.to_pylist()}:
            found[key] = found.get(key, 0) + 1
    return sum(count > 1 for count in found.values())


def _composition(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the common composition: `log` if any is a log, else their own."""
    every: list[dict[str, Any]] = [trace.manifest["composition"] for trace in traces]
    if all(each == every[0] for each in every):
        return every[0]
    if any(each["kind"] == "log" for each in every):
        return {"kind": "log"}
    return {"kind": "mixed", "of": ", ".join(" ".join(map(str, each.values())) for each in every)}
