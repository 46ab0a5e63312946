"""moe-cache-lab's routing traces, version 1: JSONL with a metadata line and a line for each token and layer.

    {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": 1, "model_id", ...}
    {"record_type": "routing_selection", "phase": "prompt"|"generated", "token_position", "layer", "selected_experts",
     "selected_probabilities": [...] | [], "token_id"}

A file is one sequence: the prompt layer by layer, then generated tokens one by one. Deviation: every token must have
every layer, which the format does not require. Version 2, for encoders and decoders, is refused.

Source: github.com/birkansit/moe-cache-lab, TRACE_FORMAT.md. The output follows its profile of reproducible bytes (keys
sorted, no spaces); `created_at` is left out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.json_files import parse_object
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import (
    Routes,
    RouteSequence,
    check,
    prompt_rows,
    renormalized,
    run_order,
    whole_requests,
)
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

FOLDER_MARK = "00000.jsonl"
_FORMAT = "moe-cache-lab.routing-jsonl"
_PHASES = ("prompt", "generated")


def recognize(sample: FileSample) -> str | None:
    """Recognize the metadata line."""
    return f"its first line says {_FORMAT}" if sample.first_object.get("format") == _FORMAT else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, not such a file, or lacks a token in some layer.
        UsageError: the number of experts or their bytes are not given.
    """
    metadata, events = _events(path)
    layers = sorted({event["layer"] for event in events})
    positions = sorted({event["token_position"] for event in events})
    place = {(event["token_position"], event["layer"]): event for event in events}
    for position in positions:
        for layer in layers:
            if (position, layer) not in place:
                raise MismatchError(f"{path} lacks layer {layer} of the token at {position}, expected every layer")
    top_k_L = [len(place[positions[0], layer]["selected_experts"]) for layer in layers]
    spec = facts.spec_of(
        path, name=metadata["model_id"], layers=layers, num_experts=metadata.get("num_experts"), top_k_L=top_k_L
    )
    grid = [[place[position, layer] for layer in layers] for position in positions]
    for row in grid:
        if [len(event["selected_experts"]) for event in row] != top_k_L:
            raise MismatchError(f"{path} has other numbers of experts at {row[0]['token_position']} than at the first")
        if len({(event["phase"], event.get("token_id")) for event in row}) > 1:
            raise MismatchError(f"{path} has several phases or token ids for the token at {row[0]['token_position']}")
    experts_TS = np.array([[e for event in row for e in event["selected_experts"]] for row in grid], np.int64)
    known = [event.get("selected_probabilities") or [] for event in events]
    weights_TS = None
    if all(known):
        weights_TS = np.array(
            [[w for event in row for w in event["selected_probabilities"]] for row in grid], np.float16
        )
        spec = renormalized(spec, facts, weights_TS)
    check(path, spec, experts_TS, weights_TS)
    ids = [row[0].get("token_id") for row in grid]
    notes = ["top-k only: no scores over all experts, no embeddings"]
    if any(known) and weights_TS is None:
        notes.append(f"{path.name}: some tokens have no probabilities, so all were left out")
    return Routes(
        spec=spec,
        task=path.stem,
        sequences=[
            RouteSequence(
                name=path.stem,
                prompt_tokens=sum(row[0]["phase"] == "prompt" for row in grid),
                experts_TS=experts_TS.astype(np.uint16),
                weights_TS=weights_TS,
                token_id_T=None if None in ids else np.array(ids, np.int32),
                position_T=np.array(positions, np.int32),
            )
        ],
        notes=notes,
    )


def _events(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the metadata and the events in order, each checked by itself."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise MismatchError(f"{path} is not text ({error.reason}), expected JSON lines") from None
    records = [(i, _object(f"{path}, line {i}", line)) for i, line in enumerate(lines, 1) if line.strip()]
    head = records[0][1] if records else {}
    found = head.get("record_type"), head.get("format"), head.get("format_version")
    if found != ("metadata", _FORMAT, 1) or isinstance(found[2], bool):
        raise MismatchError(f"{path} begins with {found}, expected ('metadata', '{_FORMAT}', 1)")
    if not isinstance(head.get("model_id"), str) or not head["model_id"]:
        raise MismatchError(f"{path} has no model_id in its metadata, expected a name")
    num_experts, width = head.get("num_experts"), head.get("experts_per_token")
    for name, value in (("num_experts", num_experts), ("experts_per_token", width)):
        if value is not None and (type(value) is not int or value < 1):
            raise MismatchError(f"{path} has {name} {value!r} in its metadata, expected a number above 0 or null")
    events: list[dict[str, Any]] = []
    seen: set[tuple[int, int]] = set()
    before: tuple[int, int, int] | None = None
    for i, event in records[1:]:
        where = f"{path}, line {i}"
        _check_event(where, event, width)
        position, layer = event["token_position"], event["layer"]
        generated = _PHASES.index(event["phase"])
        order = (generated, position, layer) if generated else (generated, layer, position)
        if (position, layer) in seen:
            raise MismatchError(f"{where} is layer {layer} of the token at {position} again, expected it once")
        if before is not None and order < before:
            raise MismatchError(f"{where} is out of order, expected the prompt layer by layer, then token by token")
        seen.add((position, layer))
        before = order
        events.append(event)
    if not events:
        raise MismatchError(f"{path} has no routing_selection, expected at least one; it is cut off")
    prompt = [event["token_position"] for event in events if event["phase"] == "prompt"]
    after = [event["token_position"] for event in events if event["phase"] == "generated"]
    if prompt and after and max(prompt) >= min(after):
        raise MismatchError(f"{path} has generated tokens at {min(after)}, before the prompt ends at {max(prompt)}")
    return head, events


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        return parse_object(line.encode(), constants=True)
    except ValueError as error:
        raise MismatchError(f"{where} is not JSON ({error}); the file is cut off or damaged") from None


def _check_event(where: str, event: dict[str, Any], width: int | None) -> None:
    if event.get("record_type") != "routing_selection" or event.get("phase") not in _PHASES:
        raise MismatchError(
            f"{where} is a {event.get('record_type')!r} of phase {event.get('phase')!r}, expected a routing_selection "
            f"of phase prompt or generated"
        )
    experts, token_id = event.get("selected_experts"), event.get("token_id")
    numbers = [event.get("token_position"), event.get("layer"), *([] if token_id is None else [token_id])]
    if (
        not isinstance(experts, list)
        or not experts
        or not all(type(number) is int and 0 <= number < 2**31 for number in [*numbers, *experts])
    ):
        raise MismatchError(f"{where} has position, layer, experts {[*numbers, experts]}, expected numbers from 0")
    if len(set(experts)) < len(experts) or (width is not None and len(experts) != width):
        raise MismatchError(f"{where} has the experts {experts}, expected {width or 'only'} different ones")
    weights = event.get("selected_probabilities") or []
    if not isinstance(weights, list) or len(weights) not in (0, len(experts)):
        raise MismatchError(f"{where} has the probabilities {str(weights)[:40]}, expected none or {len(experts)}")
    if not all(type(weight) in (int, float) and 0 <= weight <= 1 for weight in weights):
        raise MismatchError(f"{where} has the probabilities {weights}, expected numbers from 0 to 1")


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a file for each request into a folder; return notes on what the files lack. Layers are absolute.

    Raises:
        MismatchError: the trace is damaged.
    """
    spec = trace.spec
    metadata = {
        "record_type": "metadata",
        "format": _FORMAT,
        "format_version": 1,
        "model_id": spec.name,
        "num_experts": spec.num_experts if len(set(spec.num_experts_L)) == 1 else None,
        "experts_per_token": spec.top_k_L[0] if len(set(spec.top_k_L)) == 1 else None,
        "capture_method": "exported by moetool",
        "model_revision": spec.revision,
    }
    columns = ["weights"] if "weights" in trace.columns else []
    plain = True
    for number, (_, rows) in enumerate(whole_requests(trace, columns)):
        if rows.weights_TS is not None and rows.weights_TS.max(initial=0) > 1:
            rows.weights_TS, plain = None, False  # the format has no number above 1
        with (out / f"{number:05d}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for record in [metadata, *_records(trace, rows)]:
                file.write(json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n")
    notes = ["moe_cache_lab has no logits, embeddings or tasks, and does not mark requests that ran together"]
    return notes if plain else [*notes, "weights above 1 do not fit the format: they are left out of those requests"]


def _records(trace: Trace, rows: TokenBatch) -> list[dict[str, Any]]:
    spec = trace.spec
    cuts = np.cumsum(spec.top_k_L)[:-1]
    experts = [part.tolist() for part in np.split(rows.experts_TS, cuts, axis=1)]
    weights = None if rows.weights_TS is None else [part.tolist() for part in np.split(rows.weights_TS, cuts, axis=1)]
    prompt = prompt_rows(rows)
    ids, positions = rows.token_id_T.tolist(), rows.position_T.tolist()
    return [
        {
            "record_type": "routing_selection",
            "phase": _PHASES[token >= prompt],
            "token_position": positions[token],
            "layer": spec.layer_ids_L[i],
            "selected_experts": experts[i][token],
            "selected_probabilities": [] if weights is None else weights[i][token],
            "token_id": None if ids[token] < 0 else ids[token],
        }
        for token, i in run_order(spec.num_layers, prompt, len(rows))
    ]
