"""Making one trace of a part of another."""

import hashlib
import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetool import durable
from moetool.errors import UsageError
from moetool.trace import KEEP, MANIFEST, TokenBatch, Trace
from moetool.trace_writer import TraceWriter
from moetool.types import ModelSpec


def head(
    trace: Trace, out: Path, *, layers: int | None = None, requests: int | None = None, overwrite: bool = False
) -> Trace:
    """The first MoE layers, or the first requests, of a trace, as a trace of its own.

    A trace of fewer layers is of another model, one that ends there: what is trained on it fits nothing else. The
    column `ahead` is left out of it, since it looks at layers that are gone.

    Args:
        layers: how many MoE layers; all by default.
        requests: how many requests; all by default.

    Effects: writes `out`, whole or not at all.

    Raises:
        UsageError: there are not so many, or `out` exists.
        MismatchError: the trace is damaged.
    """
    spec, table = trace.spec, trace.requests
    for name, asked, there in (("layers", layers, spec.num_layers), ("requests", requests, len(table))):
        if asked is not None and not 1 <= asked <= there:
            raise UsageError(f"--{name} is {asked}, and {trace.path} has {there}; give 1 to {there}")
    num_layers = layers or spec.num_layers
    cut = _cut_spec(spec, num_layers)
    columns = trace.columns & {"weights", "logits", "hidden", *(() if num_layers < spec.num_layers else ("ahead",))}
    keep = {"topk", *(columns & set(KEEP)), *(trace.columns & {"embeddings"})}
    rows = table.slice(0, requests).to_pylist()
    wanted = np.array([row["request"] for row in rows])
    durable.require_absent(out, overwrite, MANIFEST)
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        writer = TraceWriter(folder, cut, keep, trace.ahead or 1)
        try:
            for row in rows:
                writer.add_request(**{name: value for name, value in row.items() if name != "tokens"})
            for batch in trace.batches(columns):
                mine = batch.select(np.isin(batch.request_T, wanted))
                if len(mine):
                    writer.append(_cut_rows(mine, spec, num_layers))
            if "embeddings" in keep:
                _copy_embeddings(trace, writer, set(wanted.tolist()))
            of_the_whole = ("decisions", "failed_forwards", "capture")
            kept = {k: v for k, v in trace.manifest["provenance"].items() if k not in of_the_whole}
            provenance = {**kept, "head_of": trace.sha256}
            writer.finish(composition=trace.manifest["composition"], provenance=provenance)
        except BaseException:
            writer.abort()
            raise
    return Trace(out)


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
    }
    cut = {name: column[:, :width] for name, width in widths.items() if (column := getattr(rows, name)) is not None}
    return replace(rows, **cut)


def _copy_embeddings(trace: Trace, writer: TraceWriter, wanted: Collection[int]) -> None:
    for request, iteration, embedding_D in itertools.filterfalse(lambda row: row[0] not in wanted, trace.embeddings()):
        writer.add_embedding(request, iteration, embedding_D)
