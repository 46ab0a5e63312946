"""Routes as JSON nested by token and layer: `{"router_data": [{"token_178": {"layer_0": {"selected_experts": [31, 21],
"selected_probs": [0.6, 0.4]}, ...}}, ...]}`.

A file holds one such object, a list of them, or one per line, each a request; it may be gzip. The number of a token is
its position in the sequence. A request whose first position is above 0 has new tokens only: the tokens before are its
prompt, which was not recorded. `dataset` is the task, `row_index` the name. Source: the routes of gpt-oss-20b that
GPT-OSS-MoE-ExpertFingerprinting published (github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting).
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.file_sample import FileSample, read_objects
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, RouteSequence, check, renormalized


def recognize(sample: FileSample) -> str | None:
    """Recognize an object with a list `router_data`."""
    return "JSON with router_data by token and layer" if _holds(sample.first_object) else None


def _holds(found: dict[str, Any]) -> bool:
    return isinstance(found.get("router_data"), list)


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, or a token has other layers or numbers of experts than the first.
    """
    found = [(where, _Request(where, held)) for where, held in read_objects(path) if _recorded(where, held)]
    if not found:
        raise MismatchError(f"{path} has no router_data with tokens, expected some; download it again")
    layers = found[0][1].layers
    for where, request in found:
        if request.layers != layers or request.experts_TLK.shape[2] != found[0][1].experts_TLK.shape[2]:
            raise MismatchError(f"{where} has other layers or experts per token than the first request of the file")
    top_k = found[0][1].experts_TLK.shape[2]
    num_experts, notes = facts.num_experts_or(np.concatenate([one.experts_TLK.ravel() for _, one in found]))
    spec = facts.spec_of(path, layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers))
    weighted = all(request.weights_TLK is not None for _, request in found)
    sequences: list[RouteSequence] = []
    for where, request in found:
        num_tokens = len(request.experts_TLK)
        experts_TS = request.experts_TLK.reshape(num_tokens, -1)
        weights_TS = None
        if weighted and request.weights_TLK is not None:
            weights_TS = request.weights_TLK.reshape(num_tokens, -1).astype(np.float16)
        check(where, spec, experts_TS, weights_TS)
        sequences.append(
            RouteSequence(
                name=request.name or str(len(sequences)),
                task=request.task,
                prompt_tokens=0 if request.position_T[0] else None,
                experts_TS=experts_TS.astype(np.uint16),
                weights_TS=weights_TS,
                position_T=request.position_T,
            )
        )
    every_TS = [sequence.weights_TS for sequence in sequences if sequence.weights_TS is not None]
    return Routes(
        spec=renormalized(spec, facts, np.concatenate(every_TS) if weighted else None),
        task=path.name.partition(".")[0],
        sequences=sequences,
        notes=["top-k only: no scores over all experts, no token ids", "the file does not name the model", *notes],
    )


class _Request:
    """The tokens of one object."""

    def __init__(self, where: str, held: dict[str, Any]) -> None:
        rows = [_only(where, row) for row in held["router_data"]]
        self.position_T = np.array([_number(where, "token", name) for name, _ in rows], np.int32)
        if (np.diff(self.position_T) <= 0).any():
            at = int(np.argmax(np.diff(self.position_T) <= 0))
            raise MismatchError(f"{where} has token {self.position_T[at + 1]} after {self.position_T[at]}, in no order")
        first = rows[0][1]
        names = list(first)
        self.layers = [_number(where, "layer", name) for name in names]
        if self.layers != sorted(set(self.layers)):
            raise MismatchError(f"{where} has the layers {self.layers[:8]}, expected ascending ones")
        self.experts_TLK = _values(where, rows, names, "selected_experts", int)
        self.weights_TLK = None
        if all("selected_probs" in value for _, row in rows for value in row.values() if isinstance(value, dict)):
            self.weights_TLK = _values(where, rows, names, "selected_probs", float)
            if self.weights_TLK.shape != self.experts_TLK.shape:
                raise MismatchError(f"{where} has other numbers of selected_probs than of selected_experts")
        self.name = "" if held.get("row_index") is None else str(held["row_index"])
        self.task = held["dataset"] if isinstance(held.get("dataset"), str) and held["dataset"] else None


def _recorded(where: str, held: dict[str, Any]) -> bool:
    if not _holds(held):
        raise MismatchError(f"{where} has no list router_data, expected one in each object")
    return bool(held["router_data"])


def _only(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict) or len(row) != 1 or not isinstance(inner := next(iter(row.values())), dict):
        raise MismatchError(f"{where} has the row {str(row)[:60]!r} in router_data, expected one token with its layers")
    return next(iter(row)), inner


def _number(where: str, kind: str, name: str) -> int:
    if not (found := re.fullmatch(rf"{kind}_(\d{{1,9}})", name)):
        raise MismatchError(f"{where} has the key {name[:40]!r}, expected {kind}_ and a number")
    return int(found[1])


def _values(where: str, rows: list[tuple[str, dict[str, Any]]], names: list[str], key: str, kind: type) -> np.ndarray:
    """Return [T, L, K] of one key; every token and layer has as many."""
    flat: list[Any] = []
    width = 0
    for token, row in rows:
        if list(row) != names:
            raise MismatchError(f"{where}: {token} has {len(row)} layers, expected the {len(names)} of the first token")
        for layer in names:
            value = row[layer].get(key) if isinstance(row[layer], dict) else None
            width = width or (len(value) if isinstance(value, list) else 0)
            fits = isinstance(value, list) and len(value) == width > 0
            if not fits or not all(type(x) in (int, kind) for x in value or []):
                raise MismatchError(f"{where}: {token}, {layer} has {key} {str(value)[:40]}, expected {width} numbers")
            flat += value or []
    dtype = np.int64 if kind is int else np.float64
    try:
        return np.array(flat, dtype).reshape(len(rows), len(names), width)
    except OverflowError:
        raise MismatchError(f"{where} has {key} beyond 64 bits, expected expert numbers; download it again") from None
