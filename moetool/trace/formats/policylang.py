"""policylang's Parquet of routes: a row for each token and layer, with lists of experts and scores.

    prompt_id, token_idx, layer_idx int32; selected_experts list<int32>; router_scores, router_softmax, router_logits
    list<float32>; token_id int32; phase, language_tag, domain_tag string; token_loss; kv_shard_id

The file does not describe the model. Reading: `layer_idx` is the layer of the model, and the layers that occur are
those with experts. `phase` is prefill or prompt, then decode, generated or generation. `domain_tag` is the task. Scores
as wide as `selected_experts` are those of these experts; wider ones are those of all experts. Weights come from
`router_scores`, else from `router_softmax`; logits come from `router_logits` over all experts. `token_loss`,
`language_tag` and `kv_shard_id` are left out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool.base.errors import MismatchError, first_line
from moetool.base.types import Phase
from moetool.trace.events import router_scores
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence, check, prompt_length, renormalized, whole_requests
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

_INT32, _FLOATS = pa.int32(), pa.list_(pa.float32())
_SCHEMA = pa.schema(
    [
        ("prompt_id", _INT32),
        ("token_idx", _INT32),
        ("layer_idx", _INT32),
        ("selected_experts", pa.list_(pa.int32())),
        ("router_scores", _FLOATS),
        ("router_softmax", _FLOATS),
        ("router_logits", _FLOATS),
        ("token_id", _INT32),
        ("phase", pa.string()),
        ("language_tag", pa.string()),
        ("domain_tag", pa.string()),
        ("token_loss", pa.float32()),
        ("kv_shard_id", _INT32),
    ]
)
_PHASES = {
    **dict.fromkeys(("prefill", "prompt"), Phase.PREFILL),
    **dict.fromkeys(("decode", "generated", "generation"), Phase.DECODE),
}


def recognize(sample: FileSample) -> str | None:
    """Recognize a Parquet file with the required columns."""
    names = set(sample.parquet.names) if sample.parquet is not None else set()
    return f"a Parquet file with {', '.join(_SCHEMA.names[:4])}" if set(_SCHEMA.names[:4]) <= names else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, not such a file, or lacks a token in some layer.
        UsageError: the number of experts or their bytes are not given.
    """
    table = _table(path)
    key = [table[name].to_numpy() for name in ("prompt_id", "token_idx", "layer_idx")]
    if min(column.min() for column in key) < 0:
        raise MismatchError(f"{path} has a prompt_id, token_idx or layer_idx below 0, expected numbers from 0")
    order = np.lexsort(key[::-1])
    table = table.take(pa.array(order))
    prompt_R, token_R, layer_R = (column[order] for column in key)
    layers = np.unique(layer_R)
    num_layers = len(layers)
    if len(layer_R) % num_layers or (layer_R.reshape(-1, num_layers) != layers).any():
        at = int(np.argmax(layer_R != np.resize(layers, len(layer_R))))
        raise MismatchError(
            f"{path} lacks a layer near token {token_R[at]} of prompt {prompt_R[at]}, or has it twice, expected one "
            f"row for each of its layers {layers.tolist()}"
        )
    token_T, prompt_T = token_R[::num_layers], prompt_R[::num_layers]
    if any((of_R.reshape(-1, num_layers) != of_R[::num_layers, None]).any() for of_R in (token_R, prompt_R)):
        raise MismatchError(f"{path} has tokens without some layers, expected {num_layers} rows for each")
    experts = [_lists(path, table, "selected_experts", i, num_layers) for i in range(num_layers)]
    if any(each is None for each in experts):
        raise MismatchError(f"{path} has empty selected_experts, expected those of every token and layer")
    experts_L = [each.astype(np.int64) for each in experts if each is not None]
    top_k_L = [each.shape[1] for each in experts_L]
    wide = {name: [_lists(path, table, name, i, num_layers) for i in range(num_layers)] for name in _SCORES}
    widths = {
        each.shape[1]
        for found in wide.values()
        for each, k in zip(found, top_k_L, strict=True)
        if each is not None and each.shape[1] > k
    }
    if len(widths) > 1:
        raise MismatchError(f"{path} has scores over {sorted(widths)} experts, expected one number for all layers")
    num_experts = widths.pop() if widths else None
    spec = facts.spec_of(
        path,
        layers=layers.tolist(),
        num_experts=num_experts,
        top_k_L=top_k_L,
        has_logits=_full(wide["router_logits"], num_experts),
    )
    experts_TS = np.concatenate(experts_L, axis=1)
    weights_TS = _weights(path, wide, experts_L, top_k_L)
    check(path, spec, experts_TS, weights_TS)
    logits_TF = None
    if _full(wide["router_logits"], num_experts):
        logits_TF = np.concatenate([each for each in wide["router_logits"] if each is not None], axis=1)
        if not np.isfinite(logits_TF).all():
            raise MismatchError(f"{path} has router_logits that are not finite, expected numbers")
    spec = renormalized(spec, facts, weights_TS)
    rows = table.take(pa.array(np.arange(0, len(table), num_layers)))
    notes = ["the file names neither the model nor the requests that ran together"]
    if logits_TF is None:
        notes.append("top-k only: no scores over all experts")
    return Routes(
        spec=spec,
        task=path.stem,
        sequences=_sequences(path, rows, prompt_T, token_T, experts_TS, weights_TS, logits_TF),
        notes=notes,
    )


_SCORES = ("router_scores", "router_softmax", "router_logits")


def _table(path: Path) -> pa.Table:
    """Return the columns in the format's types; those of scores and ids may be missing."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise MismatchError(
            f"{path} is not a complete Parquet file ({first_line(error)}); download it again"
        ) from error
    columns: dict[str, pa.ChunkedArray] = {}
    for name in (*_SCHEMA.names[:4], *_SCORES, "token_id", "phase", "domain_tag"):
        kind, needed = _SCHEMA.field(name).type, name in _SCHEMA.names[:4]
        if name not in table.column_names:
            if needed:
                raise MismatchError(f"{path} has no column {name}, expected those of policylang; is it such a file?")
            columns[name] = pa.chunked_array([pa.nulls(len(table), kind)])
            continue
        try:
            columns[name] = table[name].cast(kind)
        except (pa.ArrowException, ValueError) as error:
            raise MismatchError(
                f"{path} has {name} of type {table[name].type}, expected {kind} ({first_line(error)})"
            ) from None
        if needed and columns[name].null_count:
            raise MismatchError(f"{path} has empty cells in {name}, expected a value in each row")
    if not len(table):
        raise MismatchError(f"{path} has no rows, expected one for each token and layer; download it again")
    return pa.table(columns)


def _lists(path: Path, table: pa.Table, name: str, i: int, num_layers: int) -> np.ndarray | None:
    """Return a column of lists in the i-th layer, [T, width]; None where it is empty."""
    column = table[name].take(pa.array(np.arange(i, len(table), num_layers))).combine_chunks()
    if column.null_count == len(column):
        return None
    flat = column.flatten()
    lengths = np.diff(column.offsets.to_numpy())
    if column.null_count or flat.null_count or len(set(lengths.tolist())) > 1:
        raise MismatchError(f"{path} has {name} of different lengths in one layer, expected one length")
    if not lengths[0]:
        return None
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), int(lengths[0]))


def _full(found: list[np.ndarray | None], num_experts: int | None) -> bool:
    return num_experts is not None and all(each is not None and each.shape[1] == num_experts for each in found)


def _weights(
    path: Path, wide: dict[str, list[np.ndarray | None]], experts_L: list[np.ndarray], top_k_L: list[int]
) -> np.ndarray | None:
    for name in ("router_scores", "router_softmax"):
        parts = []
        for each, experts_TK, top_k in zip(wide[name], experts_L, top_k_L, strict=True):
            if each is None or each.shape[1] < top_k:
                break
            if each.shape[1] == top_k:
                parts.append(each)
            elif experts_TK.min() >= 0 and experts_TK.max() < each.shape[1]:
                parts.append(np.take_along_axis(each, experts_TK, axis=1))
            else:
                raise MismatchError(
                    f"{path} uses experts {experts_TK.min()} to {experts_TK.max()}, expected 0 to {each.shape[1] - 1}"
                )
        if len(parts) == len(top_k_L):
            return np.concatenate(parts, axis=1).astype(np.float16)
    return None


def _sequences(
    path: Path,
    rows: pa.Table,
    prompt_T: np.ndarray,
    token_T: np.ndarray,
    experts_TS: np.ndarray,
    weights_TS: np.ndarray | None,
    logits_TF: np.ndarray | None,
) -> list[RouteSequence]:
    ids, phases, tasks = (rows[name].to_pylist() for name in ("token_id", "phase", "domain_tag"))
    starts = np.flatnonzero(np.diff(prompt_T, prepend=prompt_T[0] - 1))
    has_ids = None not in ids
    sequences = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(prompt_T)], strict=True):
        number, mine = int(prompt_T[start]), slice(start, end)
        if unknown := sorted({str(phase) for phase in phases[mine]} - {*_PHASES, "None"}):
            raise MismatchError(f"{path}, prompt {number} has the phase {unknown[0]!r}, expected {', '.join(_PHASES)}")
        decode_T = np.array([_PHASES.get(phase) == Phase.DECODE for phase in phases[mine]])
        told = None not in phases[mine]
        if len(set(tasks[mine])) > 1:
            raise MismatchError(f"{path}, prompt {number} has several domain tags, expected one")
        sequences.append(
            RouteSequence(
                name=str(number),
                prompt_tokens=prompt_length(f"{path}, prompt {number}", decode_T) if told else None,
                experts_TS=experts_TS[mine].astype(np.uint16),
                weights_TS=None if weights_TS is None else weights_TS[mine],
                logits_TF=None if logits_TF is None else logits_TF[mine].astype(np.float16),
                token_id_T=np.array(ids[mine], np.int32) if has_ids else None,
                position_T=token_T[mine],
                task=tasks[start],
            )
        )
    return sequences


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace; return notes on what the file lacks. Its layers are absolute: no layer is added.

    `router_scores` are the weights of the selected experts, `router_logits` and `router_softmax` cover all experts;
    null where the trace lacks them.

    Raises:
        MismatchError: the trace is damaged.
    """
    columns = sorted(trace.columns & {"weights", "logits"})
    with pq.ParquetWriter(out, _SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for row, rows in whole_requests(trace, columns):
            writer.write_table(_request_table(trace, row, rows))
    return ["policylang has no model, embeddings or names of requests, and does not mark requests that ran together"]


def _request_table(trace: Trace, row: dict[str, Any], rows: TokenBatch) -> pa.Table:
    spec, num_tokens = trace.spec, len(rows)
    num_layers = spec.num_layers
    top, wide = (np.cumsum(widths)[:-1] for widths in (spec.top_k_L, spec.num_experts_L))
    logits = None if rows.logits_TF is None else np.split(rows.logits_TF.astype(np.float32), wide, axis=1)
    softmax = None if logits is None else [router_scores(part, "softmax") for part in logits]
    ids = pa.array(np.repeat(rows.token_id_T, num_layers))
    decodes = np.repeat(rows.phase_T == Phase.DECODE, num_layers)
    num_rows = num_tokens * num_layers

    def lists(parts: list[np.ndarray] | None, kind: pa.DataType) -> pa.Array:
        if parts is None:
            return pa.nulls(num_rows, kind)
        flat = np.concatenate(parts, axis=1).reshape(-1)  # tokens in order, each with its layers
        offsets = np.cumsum([0, *np.tile([part.shape[1] for part in parts], num_tokens).tolist()])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, kind.value_type))

    weights = None if rows.weights_TS is None else np.split(rows.weights_TS.astype(np.float32), top, axis=1)
    values = {
        "prompt_id": pa.array(np.full(num_rows, row["request"], np.int32)),
        "token_idx": pa.array(np.repeat(rows.position_T, num_layers)),
        "layer_idx": pa.array(np.tile(np.array(spec.layer_ids_L, np.int32), num_tokens)),
        "selected_experts": lists(np.split(rows.experts_TS.astype(np.int32), top, axis=1), pa.list_(pa.int32())),
        "router_scores": lists(weights, _FLOATS),
        "router_softmax": lists(softmax, _FLOATS),
        "router_logits": lists(logits, _FLOATS),
        "token_id": ids if (rows.token_id_T >= 0).all() else pa.nulls(num_rows, _INT32),
        "phase": pa.array(np.where(decodes, "decode", "prefill").tolist()),
        "domain_tag": pa.array([row["task"]] * num_rows),
    }
    filled = {name: values.get(name, pa.nulls(num_rows, _SCHEMA.field(name).type)) for name in _SCHEMA.names}
    return pa.table(filled, schema=_SCHEMA)
