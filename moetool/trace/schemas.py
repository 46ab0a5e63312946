"""Rows of a trace as Arrow, and the schemas of its files (layout: `moetool.trace.reader`).

A server has rows as arrays only, without Arrow's 5 MB.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from moetool.base.types import ModelSpec
from moetool.trace.rows import COLUMNS, SIGNALS, TokenBatch
from moetool.trace.version import SCHEMA_VERSION

REQUESTS = pa.schema(
    [
        ("request", pa.int32()),
        ("dataset", pa.string()),
        ("task", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("new_tokens", pa.int32()),
        ("label", pa.string()),  # from the prompt file; empty without one
        ("pair", pa.string()),  # shared by requests that are compared with each other; empty without one
        ("tokens", pa.int32()),  # rows of this request in tokens/
    ]
)
SINCE_1_4 = ("label", "pair")
"""Columns of requests that are empty in older traces."""
VOCABULARY = pa.schema([("token_id", pa.int32()), ("text", pa.string())])


def token_schema(spec: ModelSpec, columns: Iterable[str], ahead: int) -> pa.Schema:
    """Return the schema of tokens/. `ahead`: number of layers that the column of that name looks ahead."""
    widths = {
        **dict.fromkeys(("experts", "weights", "norms"), sum(spec.top_k_L)),
        **dict.fromkeys(("logits", "scores", "logits32"), sum(spec.num_experts_L)),
        "hidden": spec.num_layers * spec.hidden_size,
        "ahead": spec.num_layers * ahead * spec.num_experts,
        "resident": spec.num_layers * spec.num_experts,
    }
    types: dict[str, pa.DataType] = {
        **dict.fromkeys(("request", "forward", "iteration", "position", "token_id"), pa.int32()),
        "phase": pa.uint8(),
        "experts": pa.list_(pa.uint16(), widths["experts"]),
        **{name: pa.list_(pa.float16(), widths[name]) for name in ("weights", *SIGNALS)},
        "logits32": pa.list_(pa.float32(), widths["logits32"]),
    }
    offsets = {
        "moetool.top_k_offsets": [0, *np.cumsum(spec.top_k_L).tolist()],
        "moetool.expert_offsets": [0, *np.cumsum(spec.num_experts_L).tolist()],
    }
    return pa.schema(
        [(name, types[name]) for name in COLUMNS if name in columns],
        metadata={"moetool.schema_version": SCHEMA_VERSION, **{k: json.dumps(v) for k, v in offsets.items()}},
    )


def to_token_batch(record: pa.RecordBatch) -> TokenBatch:
    """Convert Arrow rows of tokens/, sharing their memory. Raises: pa.ArrowInvalid: a value is missing."""
    columns: dict[str, Any] = {}
    for name in record.schema.names:
        values = record[name]
        flat = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
        require_values(name, values, flat)
        columns[COLUMNS[name]] = flat.to_numpy(zero_copy_only=False)
        if flat is not values:
            columns[COLUMNS[name]] = columns[COLUMNS[name]].reshape(-1, values.type.list_size)
    return TokenBatch(**columns)


def require_values(name: str, *arrays: Any) -> None:
    """Raise pa.ArrowInvalid if a column or its lists have nulls."""
    if any(array.null_count for array in arrays):
        raise pa.ArrowInvalid(f"column {name} lacks values")


def to_record_batch(rows: TokenBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema from rows of tokens/."""
    arrays = [to_array(getattr(rows, COLUMNS[field.name]), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return a column of one type; a matrix becomes fixed-size lists."""
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, type=kind)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type=kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def embedding_schema(spec: ModelSpec) -> pa.Schema:
    """Return the schema of iterations/."""
    vector = pa.list_(pa.float16(), spec.hidden_size)
    return pa.schema([("request", pa.int32()), ("iteration", pa.int32()), ("embedding", vector)])
