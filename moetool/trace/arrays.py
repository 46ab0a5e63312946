"""A trace in memory: arrays by token, layer and expert, and a table in long form."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.trace.rows import COLUMNS, TokenBatch

if TYPE_CHECKING:
    import pyarrow as pa

_WIDTHS = {
    **dict.fromkeys(("experts", "weights", "norms"), "top_k_L"),
    **dict.fromkeys(("logits", "logits32", "scores"), "num_experts_L"),
}


def require_layers(spec: ModelSpec, column: str) -> None:
    """Raise MismatchError if a column is not per layer, or the layers differ in width."""
    if column not in _WIDTHS:
        raise MismatchError(f"{column} is not a per-layer column, expected one of {', '.join(_WIDTHS)}")
    widths = set(getattr(spec, _WIDTHS[column]))
    if len(widths) > 1:
        raise MismatchError(f"the layers of {spec.name} have {sorted(widths)} values of {column}, expected one")


def by_layer(spec: ModelSpec, column: str, batches: Iterable[TokenBatch]) -> np.ndarray:
    """Return a column of a trace, tokens in the trace's order.

    Returns:
        [T, L, K] of `experts`, `weights` and `norms`; [T, L, E] of `logits`, `logits32` and `scores`.

    Raises:
        MismatchError: as `require_layers`.
    """
    require_layers(spec, column)
    parts: list[np.ndarray] = [getattr(rows, COLUMNS[column]) for rows in batches]
    width = sum(getattr(spec, _WIDTHS[column]))
    flat = np.concatenate(parts) if parts else np.zeros((0, width))
    return flat.reshape(len(flat), spec.num_layers, width // spec.num_layers)


def long_table(spec: ModelSpec, requests: "pa.Table", batches: Iterable[TokenBatch]) -> "pa.Table":
    """Return a row for each expert that a token uses in a layer.

    Columns: request, dataset, task, phase, iteration, position, token_id, layer (absolute), rank, expert, and weight
    if recorded.

    The same in DuckDB, without moetool, for a trace with equal layers (L layers, top-k K):

        SELECT request, position, (i - 1) // K AS layer_index, (i - 1) % K AS rank, experts[i] AS expert
        FROM 'TRACE/tokens/*.parquet', range(1, L * K + 1) AS places(i)

    Raises:
        MismatchError: there are no tokens.
    """
    import pyarrow as pa

    layer_S = np.repeat(np.array(spec.layer_ids_L, np.int32), spec.top_k_L)
    rank_S = np.concatenate([np.arange(top_k, dtype=np.int32) for top_k in spec.top_k_L])
    named = {row["request"]: row for row in requests.to_pylist()}
    tables = []
    for rows in batches:
        width, num = len(layer_S), len(rows)
        numbers = rows.request_T.tolist()
        columns: dict[str, Any] = {
            "request": np.repeat(rows.request_T, width),
            "dataset": pa.array([named[r]["dataset"] for r in numbers]).take(
                pa.array(np.repeat(np.arange(num), width))
            ),
            "task": pa.array([named[r]["task"] for r in numbers]).take(pa.array(np.repeat(np.arange(num), width))),
            "phase": np.repeat(rows.phase_T, width),
            "iteration": np.repeat(rows.iteration_T, width),
            "position": np.repeat(rows.position_T, width),
            "token_id": np.repeat(rows.token_id_T, width),
            "layer": np.tile(layer_S, num),
            "rank": np.tile(rank_S, num),
            "expert": rows.experts_TS.ravel(),
        }
        if rows.weights_TS is not None:
            columns["weight"] = rows.weights_TS.ravel()
        tables.append(pa.table(columns))
    if not tables:
        raise MismatchError("the trace has no tokens, expected some; capture again")
    return pa.concat_tables(tables)
