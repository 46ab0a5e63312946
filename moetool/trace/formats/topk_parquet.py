"""Routes in Parquet, one row per token: `sequence`, `position`, `expert_ids` and `weights`, the last two [layer, k]
flat.

The schema metadata holds `model`, `moe_layers` (such as "1..26"), `num_experts`, `top_k`, `layout` and `task`, and
perhaps `expert_bytes`. Source: the routes that DeepSeek published with ESFT
(github.com/deepseek-ai/ESFT, results/expert_scores). The file does not separate the prompt from new tokens, unless its
metadata say `positions` from the first generated token: then it holds new tokens only, and no prompt.
"""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool.base.errors import MismatchError, first_line
from moetool.base.types import UNKNOWN_BYTES, ModelSpec
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, require_even, spec_from_routes
from moetool.trace.foreign.routes import (
    Routes,
    RouteSequence,
    check,
    one_task,
    renormalized,
    weight_sums,
    whole_requests,
)
from moetool.trace.reader import Trace

_ANSWERS = "first generated token"
_KEYS = ("model", "moe_layers", "num_experts", "top_k", "layout")
_BATCH_ROWS = 1 << 14
_VALUES = {"sequence": np.int32, "position": np.int32, "expert_ids": np.int16, "weights": np.float16}
_MODELS: dict[str, dict[str, int]] = {
    # config.json: hidden_size 2048, moe_intermediate_size 1408, n_shared_experts 2; three bfloat16 matrices per expert
    "deepseek-ai/DeepSeek-V2-Lite": {"hidden_size": 2048, "num_shared_experts": 2, "expert_bytes": 3 * 2048 * 1408 * 2}
}


def recognize(sample: FileSample) -> str | None:
    """Recognize a Parquet file with moe_layers in its schema metadata."""
    metadata = (sample.parquet.metadata or {}) if sample.parquet is not None else {}
    return "a Parquet file with moe_layers in its schema metadata" if b"moe_layers" in metadata else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file, a part at a time.

    Raises:
        MismatchError: it is damaged, not such a file, or of another model than the given one.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            header = _header(path, file.schema_arrow.metadata or {})
            spec = facts.adopt(path, _spec(path, header, facts))
            columns = _columns(path, file, sum(spec.top_k_L))
    except (pa.ArrowException, OSError) as error:
        raise MismatchError(
            f"{path} is not a complete Parquet file ({first_line(error)}); download it again"
        ) from error
    check(path, spec, columns["expert_ids"], columns["weights"])
    sums_TL = weight_sums(spec, columns["weights"])
    task = header.get("task", path.stem)
    answers = _ANSWERS in header.get("positions", "")
    notes = [
        "top-k only: no scores over all experts, no embeddings, no token ids",
        "positions count from the first new token"
        if answers
        else "teacher-forced: the file does not separate the prompt from new tokens",
        f"{task}: the top-k weights of a layer add up to {sums_TL.mean():.2f} on average",
    ]
    if "expert_bytes" not in header and header["model"] in _MODELS and facts.known("expert_bytes") is None:
        notes.append("bytes of an expert and hidden size are those of the model's published config, in bfloat16")
    return Routes(
        spec=renormalized(spec, facts, columns["weights"]),
        task=task,
        sequences=_sequences(path, columns, 0 if answers else None),
        notes=notes,
    )


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace of one task; return notes on what the file lacks. Layers are absolute: no layer is added.

    Raises:
        MismatchError: the trace has several tasks, no weights, gaps between its MoE layers or in a request's positions,
            or layers of different shape.
    """
    spec = trace.spec
    require_even(spec, "topk_parquet")
    trace.require(["weights"], "topk_parquet")
    first, last = spec.layer_ids_L[0], spec.layer_ids_L[-1]
    unrecorded = trace.unrecorded_prompts
    if spec.layer_ids_L != tuple(range(first, last + 1)):
        raise MismatchError(f"topk_parquet needs a run of layers, but {spec.name} has experts in {spec.layer_ids_L}")
    metadata = {
        "model": spec.name,
        "moe_layers": f"{first}..{last}",
        "num_experts": str(spec.num_experts),
        "top_k": str(spec.top_k_L[0]),
        "layout": "expert_ids and weights are [layer, k] flattened row-major",
        "task": one_task(trace, "topk_parquet"),
        "expert_bytes": str(spec.slot_bytes),
        **({"positions": f"from 0 at the {_ANSWERS}"} if unrecorded and unrecorded == len(trace.requests) else {}),
    }
    schema = pa.schema(list(_types(sum(spec.top_k_L)).items()), metadata=metadata)
    with pq.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer:
        for sequence, (row, rows) in enumerate(whole_requests(trace, ["weights"])):
            assert rows.weights_TS is not None
            if not np.array_equal(rows.position_T, np.arange(len(rows))):
                raise MismatchError(
                    f"topk_parquet counts positions from 0, but request {row['request']} begins at "
                    f"{rows.position_T[0]} or has gaps; export to policylang or moe_cache_lab"
                )
            flat = {"expert_ids": rows.experts_TS.astype(np.int16), "weights": rows.weights_TS}
            columns = {
                "sequence": pa.array(np.full(len(rows), sequence, np.int32)),
                "position": pa.array(rows.position_T),
                **{
                    name: pa.FixedSizeListArray.from_arrays(
                        pa.array(np.ascontiguousarray(values).reshape(-1)), type=schema.field(name).type
                    )
                    for name, values in flat.items()
                },
            }
            writer.write_table(pa.table(columns, schema=schema))
    return ["topk_parquet does not separate the prompt from new tokens, nor mark requests that ran together"]


def _types(width: int) -> dict[str, pa.DataType]:
    return {
        "sequence": pa.int32(),
        "position": pa.int32(),
        "expert_ids": pa.list_(pa.int16(), width),
        "weights": pa.list_(pa.float16(), width),
    }


def _header(path: Path, metadata: dict[bytes, bytes]) -> dict[str, str]:
    header = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in metadata.items()}
    if missing := [key for key in _KEYS if key not in header]:
        raise MismatchError(
            f"{path} has no {', '.join(missing)} in its schema metadata, expected {', '.join(_KEYS)}; "
            f"is it a file of routes?"
        )
    if "[layer, k]" not in header["layout"]:
        raise MismatchError(f"{path} has the layout {header['layout']!r}, expected [layer, k] flattened row-major")
    return header


def _spec(path: Path, header: dict[str, str], facts: ModelFacts) -> ModelSpec:
    model = header["model"]
    known = _MODELS.get(model, {})
    span = re.match(r"\s*(\d+)\s*\.\.\s*(\d+)", header["moe_layers"])
    first, last = (int(span[1]), int(span[2])) if span else (1, 0)
    if last < first:
        raise MismatchError(f"{path} has the moe_layers {header['moe_layers']!r}, expected a range such as '1..26'")
    num_experts, top_k = (_number(path, header, key) for key in ("num_experts", "top_k"))
    if top_k > num_experts:
        raise MismatchError(f"{path} has top_k {top_k} of num_experts {num_experts}, expected at most {num_experts}")
    expert_bytes = _number(path, header, "expert_bytes") if "expert_bytes" in header else UNKNOWN_BYTES
    if expert_bytes == UNKNOWN_BYTES:
        expert_bytes = facts.known("expert_bytes") or known.get("expert_bytes") or UNKNOWN_BYTES
    layers = tuple(range(first, last + 1))
    told_facts = {"layers": layers, "num_experts": num_experts, "top_k": top_k, "expert_bytes": expert_bytes}
    return spec_from_routes(
        model,
        told_facts,
        layer_ids_L=layers,
        num_experts_L=(num_experts,) * len(layers),
        top_k_L=(top_k,) * len(layers),
        num_shared_experts=known.get("num_shared_experts", 0),
        hidden_size=facts.hidden_size or known.get("hidden_size", 0),
        expert_bytes_L=(expert_bytes,) * len(layers),
    )


def _number(path: Path, header: dict[str, str], key: str) -> int:
    try:
        number = int(header[key])
    except ValueError:
        number = 0
    if number < 1:
        raise MismatchError(f"{path} has {key} {header[key]!r} in its schema metadata, expected a whole number above 0")
    return number


def _columns(path: Path, file: pq.ParquetFile, width: int) -> dict[str, np.ndarray]:
    expected, found = _types(width), file.schema_arrow
    if sorted(found.names) != sorted(expected):
        raise MismatchError(
            f"{path} has the columns {', '.join(found.names)}, expected {', '.join(expected)}; is it a file of routes?"
        )
    columns, num_rows = {}, file.metadata.num_rows
    for name, kind in expected.items():
        if not found.field(name).type.equals(kind) and not _same_list(found.field(name).type, kind):
            raise MismatchError(
                f"{path} has {name} of type {found.field(name).type}, expected {kind}; does its header fit?"
            )
        listed = pa.types.is_fixed_size_list(kind)
        columns[name] = np.empty((num_rows, width) if listed else num_rows, _VALUES[name])
    if not num_rows:
        raise MismatchError(f"{path} has no rows, expected one for each token; download it again")
    row = 0
    for batch in file.iter_batches(_BATCH_ROWS):
        for name, values in columns.items():
            column = batch.column(name)
            flat = column.flatten() if values.ndim > 1 else column
            if column.null_count or flat.null_count:
                raise MismatchError(f"{path} has empty cells in {name}, expected a value in each; download it again")
            part = values[row : row + len(batch)]
            part[:] = flat.to_numpy(zero_copy_only=False).reshape(part.shape)
        row += len(batch)
    return columns


def _same_list(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two list types differ only in the name of their elements."""
    return (
        pa.types.is_fixed_size_list(found)
        and pa.types.is_fixed_size_list(expected)
        and (found.list_size, found.value_type) == (expected.list_size, expected.value_type)
    )


def _sequences(path: Path, columns: dict[str, np.ndarray], prompt_tokens: int | None) -> list[RouteSequence]:
    number_T, position_T = columns["sequence"], columns["position"]
    starts = np.flatnonzero(np.diff(number_T, prepend=number_T[0] - 1))
    sequences, seen = [], set()
    for start, end in zip(starts, [*starts[1:], len(number_T)], strict=True):
        number = int(number_T[start])
        wrong = np.flatnonzero(position_T[start:end] != np.arange(end - start))
        if number in seen or len(wrong):
            found = f"row {start} begins it again" if number in seen else f"position {position_T[start + wrong[0]]}"
            expected = "one piece" if number in seen else f"{wrong[0]}"
            raise MismatchError(f"{path}, sequence {number}: {found}, expected {expected}; rows are missing or mixed")
        seen.add(number)
        sequences.append(
            RouteSequence(
                name=str(number),
                prompt_tokens=prompt_tokens,
                experts_TS=columns["expert_ids"][start:end].view(np.uint16),
                weights_TS=columns["weights"][start:end],
            )
        )
    return sequences
