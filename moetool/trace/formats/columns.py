"""Any table of routes: a row per token and layer with a list of experts, or a row per expert that a token uses.

Columns are identified by name or `--map` (`moetool.trace.foreign.column_table`). `token` is the position in its
request; without it, rows are in the order of the model's layers (`moetool.trace.foreign.layer_runs`). Without `request`
the file is one request. `phase` (prefill or prompt, decode or generated; 0 or 1) marks the prompt.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import column_table
from moetool.trace.foreign.column_table import MappedColumns
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.layer_runs import LayerRows, by_token
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence, check, prompt_length, renormalized

GENERIC = True
TAKES_MAP = True
_PROMPT = ("prefill", "prompt", "0")
_DECODE = ("decode", "generated", "generation", "1")


def recognize(sample: FileSample) -> str | None:
    """Recognize columns for the layer and the expert, without a count."""
    names = column_table.match(column_table.column_names(sample), {})
    if not {"layer", "expert"} <= names.keys() or "count" in names:
        return None
    return f"a table with columns for {', '.join(f'{field} ({name})' for field, name in names.items())}"


def read_routes(path: Path, facts: ModelFacts, mapping: Mapping[str, str] | None = None) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, or a token lacks a layer or has other numbers of experts than the first.
        UsageError: a column is unknown, or the number of experts or their bytes are not given.
    """
    mapped = column_table.read(path, mapping or {})
    rows = _Rows(path, mapped)
    return rows.by_position(facts) if "token" in mapped.names else rows.by_order(facts)


class _Rows:
    """The file with a row for each expert that a token uses in a layer."""

    def __init__(self, path: Path, mapped: MappedColumns) -> None:
        self.path, self.mapped = path, mapped
        column = {field: mapped.table[name] for field, name in mapped.names.items()}
        listed = column_table.lists(path, mapped.names["expert"], column["expert"])
        ones = np.ones(len(mapped.table), np.int64)
        self.sizes: np.ndarray
        self.sizes, experts = (ones, column["expert"]) if listed is None else listed
        self.expert_R = column_table.whole_numbers(path, mapped.names["expert"], experts)
        self.weight_R = None
        if "weight" in column:
            weights = column_table.lists(path, mapped.names["weight"], column["weight"])
            sizes, values = (ones, column["weight"]) if weights is None else weights
            if not np.array_equal(sizes, self.sizes):
                raise MismatchError(f"{path} has other numbers of weights than of experts, expected one for each")
            self.weight_R = column_table.numbers(path, mapped.names["weight"], values)
        self.layer_R = self._numbers("layer", column)
        self.token_R = self._numbers("token", column) if "token" in column else None
        self.rank_R = self._numbers("rank", column) if "rank" in column else np.zeros(len(self.expert_R), np.int64)
        self.token_id_R = self._numbers("token_id", column) if "token_id" in column else None
        self.request_R, self.requests = self._labels("request", column, path.stem)
        self.task_R, self.tasks = self._labels("task", column, path.stem)
        self.decode_R = None
        if "phase" in column:
            phase_R, phases = self._labels("phase", column, "")
            if unknown := [phase for phase in phases if phase.casefold() not in (*_PROMPT, *_DECODE)]:
                raise MismatchError(f"{path} has the phase {unknown[0]!r}, expected {', '.join((*_PROMPT, *_DECODE))}")
            self.decode_R = np.array([phase.casefold() in _DECODE for phase in phases])[phase_R]

    def _numbers(self, field: str, column: Mapping[str, object]) -> np.ndarray:
        found = column_table.whole_numbers(self.path, self.mapped.names[field], column[field])
        return np.repeat(found, self.sizes)

    def _labels(self, field: str, column: Mapping[str, object], default: str) -> tuple[np.ndarray, list[str]]:
        if field not in column:
            return np.zeros(len(self.expert_R), np.int64), [default]
        found, names = column_table.labels(column[field])
        return np.repeat(found, self.sizes), names

    def by_position(self, facts: ModelFacts) -> Routes:
        """Return sequences by request and position; rows may be in any order."""
        assert self.token_R is not None
        order = np.lexsort((self.rank_R, self.layer_R, self.token_R, self.request_R))
        request_R, token_R, layer_R = (column[order] for column in (self.request_R, self.token_R, self.layer_R))
        new_R = np.ones(len(order), bool)
        new_R[1:] = (np.diff(request_R) != 0) | (np.diff(token_R) != 0)
        start_T = np.flatnonzero(new_R)
        pattern_S = layer_R[: start_T[1] if len(start_T) > 1 else None]
        width = len(pattern_S)
        size_T = np.diff(np.append(start_T, len(order)))
        wrong_T = size_T != width
        if not wrong_T.any():
            wrong_T = (layer_R.reshape(-1, width) != pattern_S).any(axis=1)
        if wrong_T.any():
            at = int(np.argmax(wrong_T))
            raise MismatchError(
                f"{self.path}: token {token_R[start_T[at]]} of request {self.requests[request_R[start_T[at]]]!r} has "
                f"{size_T[at]} experts over its layers, expected {width} in the same layers as the first token; rows "
                f"are missing or twice"
            )
        layers, top_k_L = np.unique(pattern_S, return_counts=True)
        shape = len(start_T), width
        experts_TS = self.expert_R[order].reshape(shape)
        weights_TS = None if self.weight_R is None else self.weight_R[order].reshape(shape).astype(np.float16)
        num_experts, notes = facts.num_experts_or(self.expert_R)
        spec = facts.spec_of(self.path, layers=layers.tolist(), num_experts=num_experts, top_k_L=top_k_L.tolist())
        check(self.path, spec, experts_TS, weights_TS)
        spec = renormalized(spec, facts, weights_TS)
        sequences = []
        edges = [*np.flatnonzero(np.diff(request_R[start_T], prepend=-1)).tolist(), len(start_T)]
        for start, stop in pairwise(edges):
            rows = order[start_T[start:stop]]
            sequences.append(
                RouteSequence(
                    name=self.requests[request_R[start_T[start]]],
                    prompt_tokens=self._prompt(rows),
                    experts_TS=experts_TS[start:stop].astype(np.uint16),
                    weights_TS=None if weights_TS is None else weights_TS[start:stop],
                    token_id_T=None if self.token_id_R is None else self.token_id_R[rows].astype(np.int32),
                    position_T=token_R[start_T[start:stop]].astype(np.int32),
                    task=self._task(rows),
                )
            )
        return Routes(spec=spec, task=self.path.stem, sequences=sequences, notes=[*self._notes(), *notes])

    def by_order(self, facts: ModelFacts) -> Routes:
        """Return sequences by the order of the rows, layer by layer."""
        if len(self.requests) > 1:
            raise MismatchError(
                f"{self.path} has requests and no column for the token; name it with --map token=COLUMN"
            )
        runs = np.diff(np.append(np.flatnonzero(np.diff(self.layer_R, prepend=self.layer_R[0] - 1)), len(self.layer_R)))
        top_k = facts.known("top_k") or (int(self.sizes[0]) if self.sizes[0] > 1 else int(runs.min()))
        if (runs % top_k).any():
            raise MismatchError(
                f"{self.path} has {runs[runs % top_k != 0][0]} experts in a run of one layer, expected a multiple of "
                f"top_k {top_k}; name the right one with --set top_k, or the column of the token with --map token="
            )
        weights = None if self.weight_R is None else self.weight_R.reshape(-1, top_k)
        tokens = by_token(
            self.path,
            LayerRows(
                layer_R=self.layer_R[::top_k],
                experts_RK=self.expert_R.reshape(-1, top_k),
                weights_RK=weights,
                decode_R=None if self.decode_R is None else self.decode_R[::top_k],
            ),
        )
        notes = [*self._notes(), "tokens follow from the order of the rows, since no column numbers them"]
        return tokens.routes(self.path, facts, notes)

    def _prompt(self, rows: np.ndarray) -> int | None:
        if self.decode_R is None:
            return None
        return prompt_length(f"{self.path}: request {self.requests[self.request_R[rows[0]]]!r}", self.decode_R[rows])

    def _task(self, rows: np.ndarray) -> str | None:
        found = np.unique(self.task_R[rows])
        if len(found) > 1:
            raise MismatchError(
                f"{self.path}: request {self.requests[self.request_R[rows[0]]]!r} has several tasks, expected one; map "
                f"task to another column, or request to one that tells these apart"
            )
        return self.tasks[found[0]] or None

    def _notes(self) -> list[str]:
        notes = [*self.mapped.notes, "the file does not name the model"]
        if self.weight_R is None:
            notes.append("top-k only: no weights, no scores over all experts")
        return notes
