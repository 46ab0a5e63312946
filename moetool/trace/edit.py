"""Parts of a trace as traces: the first layers or requests, a sample, or a split by task or request."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import durable
from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import ModelSpec
from moetool.trace.reader import MANIFEST, Trace
from moetool.trace.rows import EXTRA, KEEP, SIGNALS, TokenBatch
from moetool.trace.writer import TraceWriter

SPLIT_BY = ("task", "label", "request")
SPLIT = "split.json"
_OF_THE_WHOLE = ("decisions", "failed_forwards", "capture")  # these describe all requests of a trace


def head(
    trace: Trace, out: Path, *, layers: int | None = None, requests: int | None = None, overwrite: bool = False
) -> Trace:
    """Write the first MoE layers or requests of a trace as a new trace. Requests keep their numbers.

    A trace of fewer layers belongs to a truncated model, as does everything trained on it. The columns `ahead` and
    `resident` are then left out, since they refer to removed layers.

    Args:
        layers: number of MoE layers (default: all).
        requests: number of requests (default: all).

    Effects: writes `out`, whole or not at all.

    Raises:
        UsageError: the trace has fewer, or `out` exists.
        MismatchError: the trace is damaged.
    """
    spec = trace.spec
    for name, asked, there in (("layers", layers, spec.num_layers), ("requests", requests, len(trace.requests))):
        if asked is not None and not 1 <= asked <= there:
            raise UsageError(f"--{name} is {asked}, and {trace.path} has {there}; give 1 to {there}")
    num_layers = layers or spec.num_layers
    columns = trace.columns if num_layers == spec.num_layers else trace.columns - {"ahead", "resident"}
    numbers = {request: request for request in request_numbers(trace)[:requests]}
    return _copy(trace, out, numbers, overwrite, num_layers=num_layers, columns=columns)


def select(trace: Trace, out: Path, requests: Collection[int], *, overwrite: bool = False) -> Trace:
    """Write some requests of a trace as a new trace, in their order and renumbered. Errors as for `head`."""
    chosen = (request for request in request_numbers(trace) if request in requests)
    numbers = {request: number for number, request in enumerate(chosen)}
    return _copy(trace, out, numbers, overwrite, num_layers=trace.spec.num_layers, columns=trace.columns)


def _copy(
    trace: Trace, out: Path, numbers: Mapping[int, int], overwrite: bool, *, num_layers: int, columns: frozenset[str]
) -> Trace:
    """Copy requests under new numbers."""
    durable.require_absent(out, overwrite, MANIFEST)
    with durable.staged_directory(out, overwrite, MANIFEST) as folder, ExitStack() as stack:
        writer = part_writer(stack, folder, _cut_spec(trace.spec, num_layers), columns, trace)
        places = {request: (writer, number) for request, number in numbers.items()}
        copy_requests(trace, columns, places, num_layers=num_layers)
        _finish(writer, trace, {"head_of": trace.sha256})
    return Trace(out)


def split(
    trace: Trace, out: Path, *, by: str, shares: Sequence[float] = (), overwrite: bool = False
) -> dict[str, Trace]:
    """Write the parts of a trace, each a trace in a folder of `out`, requests in their order and renumbered.

    Args:
        by: `task` or `label`: one part for each, with its name. `request`: parts `0`, `1`, ... of the given shares, the
            last of the remainder. Each request goes to the part furthest below its share, so that parts are evenly
            spread over the trace.
        shares: with `request` only; above 0, together at most 1.

    Effects: writes `out`, whole or not at all; its `split.json` describes the parts.

    Raises:
        UsageError: invalid shares, a part that would be empty, or `out` exists.
        MismatchError: the trace is damaged.
    """
    if by not in SPLIT_BY:
        raise unknown_name("--by", by, SPLIT_BY)
    part_of = _by_share(trace, shares) if by == "request" else _by_name(trace, by, shares)
    names = list(dict.fromkeys(sorted(part_of.values()) if by != "request" else map(str, range(_count(shares)))))
    if empty := [name for name in names if name not in part_of.values()]:
        raise UsageError(f"part {empty[0]} of {trace.path} would have no request, of {len(part_of)} in all")
    durable.require_absent(out, overwrite, SPLIT)
    with durable.staged_directory(out, overwrite, SPLIT) as folder, ExitStack() as stack:
        writers = {}
        for name in names:
            (folder / name).mkdir()
            writers[name] = part_writer(stack, folder / name, trace.spec, trace.columns, trace)
        next_number = dict.fromkeys(names, 0)
        places = {}
        for request in request_numbers(trace):
            name = part_of[request]
            places[request] = writers[name], next_number[name]
            next_number[name] += 1
        copy_requests(trace, trace.columns, places)
        for name, writer in writers.items():
            _finish(writer, trace, {"split_of": trace.sha256, "by": by, "part": name})
        about = {"kind": "split", "of": trace.sha256, "by": by, "shares": list(shares), "parts": next_number}
        durable.write_text(folder / SPLIT, json.dumps(about, indent=1) + "\n")
    return {name: Trace(out / name) for name in names}


def request_numbers(trace: Trace) -> list[int]:
    """Return the requests of a trace, in their order."""
    return trace.requests["request"].to_pylist()


def _by_name(trace: Trace, by: str, shares: Sequence[float]) -> dict[int, str]:
    """Return the part of each request: its task or label as a folder name, with the dataset where ambiguous."""
    if shares:
        raise UsageError(f"--share is for --by request; leave it out with --by {by}")
    rows = trace.requests.to_pylist()
    if not any(row[by] for row in rows):
        raise UsageError(f"no request of {trace.path} has a {by}; capture prompts of a file with a field {by!r}")
    names: dict[tuple[str, str], str] = {}
    for key in sorted({(row["dataset"], row[by]) for row in rows}, key=lambda key: key[::-1]):
        name = re.sub(r"[^\w.-]+", "_", key[1]).strip(".") or f"no-{by}"
        whole = re.sub(r"[^\w.-]+", "_", "-".join(key)).strip(".")
        taken = {other.casefold() for other in (*names.values(), SPLIT)}
        fitting = (each for each in (name, whole, *(f"{whole}-{i}" for i in range(2, len(rows) + 3))))
        names[key] = next(each for each in fitting if each.casefold() not in taken)
    return {row["request"]: names[row["dataset"], row[by]] for row in rows}


def _count(shares: Sequence[float]) -> int:
    return len(shares) + (sum(shares) < 1 - 1e-9)


def _by_share(trace: Trace, shares: Sequence[float]) -> dict[int, str]:
    if not shares or not all(0 < share < 1 for share in shares) or sum(shares) > 1 + 1e-9:
        raise UsageError(f"--share {list(shares)}: expected shares above 0 and below 1, together at most 1, as in 0.8")
    every = [*shares, 1 - sum(shares)][: _count(shares)]
    taken = [0] * len(every)
    part_of = {}
    for place, request in enumerate(request_numbers(trace), 1):
        part = max(range(len(every)), key=lambda i: (round(every[i] * place - taken[i], 9), -i))
        taken[part] += 1
        part_of[request] = str(part)
    return part_of


def part_writer(stack: ExitStack, folder: Path, spec: ModelSpec, columns: frozenset[str], like: Trace) -> TraceWriter:
    """Open a writer with the column options of `like`; it is aborted if the stack unwinds early."""
    keep = {"topk", *(columns & {*KEEP, *EXTRA})}
    return stack.enter_context(
        TraceWriter(folder, spec, keep, like.ahead or 1, weights="weights" in columns, resident=like.resident)
    )


def copy_requests(
    trace: Trace,
    columns: frozenset[str],
    places: Mapping[int, tuple[TraceWriter, int]],
    *,
    num_layers: int | None = None,
    first_forward: int = 0,
) -> int:
    """Copy requests, each to its writer under its new number; return the number after the last forward.

    Args:
        num_layers: number of first layers to copy.
        first_forward: number of the trace's first forward.
    """
    for row in trace.requests.to_pylist():
        if row["request"] in places:
            writer, number = places[row["request"]]
            facts = {name: value for name, value in row.items() if name not in ("tokens", "request")}
            writer.add_request(number, **facts)
    writers = list(dict.fromkeys(writer for writer, _ in places.values()))
    index = {writer: i for i, writer in enumerate(writers)}
    size = max(request_numbers(trace), default=0) + 1
    part_R, number_R = np.full(size, -1), np.zeros(size, np.int32)
    for request, (writer, number) in places.items():
        part_R[request], number_R[request] = index[writer], number
    following = first_forward
    for batch in trace.batches(columns & {"weights", *SIGNALS}):
        following = max(following, first_forward + int(batch.forward_T.max(initial=-1)) + 1)
        known_T = batch.request_T < size
        part_T = np.where(known_T, part_R[np.where(known_T, batch.request_T, 0)], -1)
        for i, writer in enumerate(writers):
            mine = batch.select(part_T == i)
            if len(mine):
                mine.request_T = number_R[mine.request_T]
                mine.forward_T = (mine.forward_T + first_forward).astype(np.int32)
                writer.append(mine if num_layers is None else _cut_rows(mine, trace.spec, num_layers))
    if "embeddings" in columns:
        for request, iteration, embedding_D in trace.embeddings():
            if request in places:
                writer, number = places[request]
                writer.add_embedding(number, iteration, embedding_D)
    return following


def _finish(writer: TraceWriter, trace: Trace, made: dict[str, Any]) -> None:
    kept = {name: value for name, value in trace.manifest["provenance"].items() if name not in _OF_THE_WHOLE}
    writer.finish(
        composition=trace.manifest["composition"], provenance={**kept, **made}, spell=trace.vocabulary.__getitem__
    )


def _cut_spec(spec: ModelSpec, layers: int) -> ModelSpec:
    if layers == spec.num_layers:
        return spec
    fields = ("layer_ids_L", "num_experts_L", "top_k_L", "has_logits_L", "expert_bytes_L")
    revision = hashlib.sha256(f"{spec.revision} {layers} layers".encode()).hexdigest()
    shorter = {name: getattr(spec, name)[:layers] for name in fields}
    return replace(spec, name=f"{spec.name}, {layers} MoE layers", revision=revision, **shorter)


def _cut_rows(rows: TokenBatch, spec: ModelSpec, layers: int) -> TokenBatch:
    top, wide = sum(spec.top_k_L[:layers]), sum(spec.num_experts_L[:layers])
    widths = {
        "experts_TS": top,
        "weights_TS": top,
        "logits_TF": wide,
        "hidden_TH": layers * spec.hidden_size,
        "scores_TF": wide,
        "logits32_TF": wide,
        "norms_TS": top,
    }
    cut = {name: column[:, :width] for name, width in widths.items() if (column := getattr(rows, name)) is not None}
    return replace(rows, **cut)
