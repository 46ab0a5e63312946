"""SGLang's expert distribution recorder, mode per_token: one `.pt` file per rank, with the slots of each token.

    {"records": [{"forward_pass_id", "rank", "gatherer_key", "input_ids", "positions", "extend_seq_lens" | None,
                  "forward_mode": 1 extend | 2 decode | 3 mixed, "topk_ids_of_layer": int32 [H, T, 8],
                  "misc_objects", "global_physical_count": int [H, P]}, ...],
     "last_physical_to_logical_map": int [H, P]}

-1 marks places where no router ran: layers without experts, columns from top-k to 8 (the recorder's fixed width), and
padding tokens, which are left out. The mapping converts slots to experts.

The records do not name requests. `extend_seq_lens` separates the chunks of prompts in a forward. A decoded token
belongs to the sequence whose next position is its own; among several, to the first in the order of the batch, which
SGLang keeps. A sequence that is missing from a decode pass has ended. A chunk of a prompt continues a sequence that
has no decoded token yet and this next position. Otherwise it begins a new sequence, above position 0 if the engine had
the prefix in its cache. A sequence that began before the recording has new tokens only. The notes count ambiguous
tokens.

The ranks of one tensor-parallel group record the same tokens: import one file of each.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import Phase
from moetool.trace.foreign import sglang_recorder, torch_file
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers, require_even, with_dense, without_dense
from moetool.trace.foreign.routes import Routes, RouteSequence, check
from moetool.trace.reader import Trace

_WIDTH = 8
_EXTEND, _DECODE, _MIXED = 1, 2, 3


@dataclass(slots=True)
class _Sequence:
    """A request as recovered from the records: rows as indices into all tokens of the file."""

    next_position: int
    rows: list[int] = field(default_factory=list)
    decoded: int = 0
    last_record: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One forward: its tokens, in pieces of one sequence each."""

    experts_THK: np.ndarray
    ids: list[int]
    positions: list[int]
    lengths: list[int]
    mode: int


def recognize(sample: FileSample) -> str | None:
    """Recognize a `.pt` file whose records hold the experts of each token."""
    held = sglang_recorder.records_of(sample.tensors) == "per_token"
    return "a .pt file with records of topk_ids_of_layer" if held else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged or of another mode, contradicts its own counts, or is of another model.
        UsageError: the bytes of an expert are not given.
    """
    pack = torch_file.load(path)
    logical_HP = sglang_recorder.logical_map(path, pack)
    layers = facts.layers_of(path, len(logical_HP))
    found = [
        _record(f"{path}, record {i}", record, logical_HP)
        for i, record in enumerate(sglang_recorder.records(path, pack))
    ]
    experts_THK = np.concatenate([record.experts_THK for record in found])
    used_K = (experts_THK[:, list(layers)] != -1).any(axis=(0, 1))
    top_k = int(np.count_nonzero(used_K))
    if not top_k or not used_K[:top_k].all():
        raise MismatchError(f"{path} has no experts in layers {layers[0]} to {layers[-1]}: the recorder was off")
    experts_TS = without_dense(path, experts_THK[:, :, :top_k], layers, empty=-1)
    kept_T = (experts_TS != -1).any(axis=1)
    for at, layer in np.argwhere((experts_TS[kept_T].reshape(-1, len(layers), top_k) == -1).any(axis=2))[:1]:
        raise MismatchError(
            f"{path}: token {at} has no experts in layer {layers[layer]}, expected {top_k}; if that layer has none, "
            f"give --set model=PATH, first_k_dense=N or moe_layers=1..26"
        )
    num_experts = int(logical_HP.max()) + 1
    spec = facts.spec_of(path, layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers))
    check(path, spec, experts_TS[kept_T], None, all_layers=True)
    sequences, notes = _sequences(path, found)
    forward_T = np.repeat(np.arange(len(found)), [len(record.ids) for record in found]).astype(np.int32)
    ids_T = np.array([i for record in found for i in record.ids], np.int32)
    position_T = np.array([p for record in found for p in record.positions], np.int32)
    made: list[RouteSequence] = []
    for sequence in sequences:
        rows = [row for row in sequence.rows if kept_T[row]]
        if not rows:
            continue
        prompt = sum(bool(kept_T[row]) for row in sequence.rows[: len(sequence.rows) - sequence.decoded])
        made.append(
            RouteSequence(
                name=str(len(made)),
                prompt_tokens=prompt,
                experts_TS=experts_TS[rows].astype(np.uint16),
                token_id_T=ids_T[rows],
                position_T=position_T[rows],
                forward_T=forward_T[rows],
                new_tokens=len(rows) - prompt + 1,
            )
        )
    return Routes(
        spec=spec,
        task=path.stem,
        sequences=made,
        notes=[
            "top-k only: no weights, no scores over all experts, no embeddings",
            "tokens were assigned to requests by their positions",
            *notes,
            *sglang_recorder.map_notes(logical_HP),
        ],
    )


def _record(where: str, record: dict[str, Any], logical_HP: np.ndarray) -> _Record:
    """Return one record with slots converted to experts; -1 stays."""
    num_hidden, num_slots = logical_HP.shape
    slots_HTK = torch_file.array(where, record, "topk_ids_of_layer", 3)
    ids, positions = (_numbers(where, record, key) for key in ("input_ids", "positions"))
    num_tokens = len(ids)
    if slots_HTK.shape[:2] != (num_hidden, num_tokens) or len(positions) != num_tokens:
        raise MismatchError(
            f"{where} has topk_ids_of_layer {slots_HTK.shape}, {num_tokens} input_ids and {len(positions)} positions, "
            f"expected {num_hidden} layers and one of each for every token"
        )
    if slots_HTK.min(initial=0) < -1 or slots_HTK.max(initial=-1) >= num_slots:
        wrong = slots_HTK[(slots_HTK < -1) | (slots_HTK >= num_slots)][0]
        raise MismatchError(f"{where} uses slot {wrong}, expected -1 to {num_slots - 1}; record again")
    if "global_physical_count" in record:
        count_HP = torch_file.array(where, record, "global_physical_count", 2)
        flat_HX = slots_HTK.reshape(num_hidden, -1)
        counted_HP = np.array([np.bincount(slots[slots >= 0], minlength=num_slots) for slots in flat_HX])
        if not np.array_equal(count_HP, counted_HP):
            raise MismatchError(f"{where} contradicts its own global_physical_count; it is damaged, record again")
    logical_HTK = np.take_along_axis(logical_HP, np.maximum(slots_HTK, 0).reshape(num_hidden, -1), axis=1)
    logical_HTK = np.where(slots_HTK < 0, -1, logical_HTK.reshape(slots_HTK.shape))
    told = record.get("forward_mode")
    mode = told if type(told) is int else -1
    extends = record.get("extend_seq_lens") is not None and mode != _DECODE
    lengths = _numbers(where, record, "extend_seq_lens") if extends else [1] * num_tokens
    if sum(lengths) != num_tokens or min(lengths, default=1) < 1 or mode not in (_EXTEND, _DECODE, _MIXED, 4):
        raise MismatchError(
            f"{where} has {num_tokens} tokens in forward_mode {mode} with extend_seq_lens that add up to "
            f"{sum(lengths)}, expected as many, in modes 1 (extend), 2 (decode), 3 (mixed) or 4 (idle)"
        )
    return _Record(
        experts_THK=logical_HTK.transpose(1, 0, 2),
        ids=ids,
        positions=positions,
        lengths=lengths,
        mode=mode if extends else _DECODE,
    )


def _numbers(where: str, record: dict[str, Any], key: str) -> list[int]:
    value = record.get(key)
    if not isinstance(value, list) or not all(type(i) is int and -1 <= i < 2**31 for i in value):
        raise MismatchError(f"{where} has no list of whole numbers {key!r}, expected one; it is of another mode")
    return value


def _sequences(path: Path, found: list[_Record]) -> tuple[list[_Sequence], list[str]]:
    """Return the requests of a file in the order of their beginning, and notes on ambiguities."""
    every: list[_Sequence] = []
    live: list[_Sequence] = []
    base = shared = 0
    for number, record in enumerate(found):
        at = place = 0
        for length in record.lengths:
            first = record.positions[at]
            if record.positions[at : at + length] != list(range(first, first + length)):
                raise MismatchError(f"{path}, record {number} has gaps in the positions of a sequence; record again")
            decodes = record.mode == _DECODE or (record.mode == _MIXED and length == 1)
            fitting = [
                i
                for i, one in enumerate(live)
                if one.next_position == first and one.last_record != number and (decodes or not one.decoded)
            ]
            rows = list(range(base + at, base + at + length))
            at += length
            if fitting and (decodes or first):
                shared += length if len(fitting) > 1 else 0
                place = next((i for i in fitting if i >= place), fitting[0])
                one = live[place]
                one.decoded += decodes
            else:
                one = _Sequence(first)
                every.append(one)
                live.append(one)
                one.decoded += record.mode == _DECODE  # began before the recording
            one.rows += rows
            one.next_position += length
            one.last_record = number
        if record.mode == _DECODE and record.ids:
            live = [one for one in live if one.last_record == number]
        base += len(record.ids)
    notes = []
    if shared:
        notes.append(f"{shared} tokens fit several sequences and went to the first in the order of the batch")
    if cached := sum(one.next_position > len(one.rows) > one.decoded for one in every):
        notes.append(f"{cached} sequences begin after a prefix that the engine had in its cache")
    return every, notes


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace as the records of one rank, forward by forward; return notes on what they lack.

    Raises:
        MismatchError: the layers differ in shape, or a token uses more than 8 experts.
        UsageError: `num_hidden_layers` is too small.
    """
    spec = trace.spec
    require_even(spec, "sglang_per_token")
    if spec.top_k_L[0] > _WIDTH:
        raise MismatchError(f"SGLang's recorder has {_WIDTH} experts per token, but {spec.name} uses {spec.top_k_L[0]}")
    num_hidden = hidden_layers(spec, num_hidden_layers)
    records: list[dict[str, Any]] = []
    order: dict[int, int] = {}
    for rows in trace.recorded_forwards([]):
        for request in rows.request_T.tolist():
            order.setdefault(request, len(order))
        turn_T = np.array([order[request] for request in rows.request_T.tolist()])
        rows = rows.select(np.lexsort((rows.position_T, turn_T, rows.phase_T)))  # prompts before decoded tokens
        num_tokens = len(rows)
        prefill = rows.phase_T == Phase.PREFILL
        mode = _EXTEND if prefill.all() else _MIXED if prefill.any() else _DECODE
        cuts = np.flatnonzero(np.diff(rows.request_T) | np.diff(rows.phase_T.astype(np.int8))) + 1
        slots_HTK = np.full((num_hidden, num_tokens, _WIDTH), -1, np.int32)
        slots_HTK[:, :, : spec.top_k_L[0]] = with_dense(spec, rows.experts_TS, num_hidden, -1).transpose(1, 0, 2)
        flat_HX = slots_HTK.reshape(num_hidden, -1)
        count_HE = np.array([np.bincount(slots[slots >= 0], minlength=spec.num_experts) for slots in flat_HX])
        records.append(
            {
                "forward_pass_id": len(records),
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": rows.token_id_T.tolist(),
                "positions": rows.position_T.tolist(),
                "extend_seq_lens": None if mode == _DECODE else np.diff([0, *cuts.tolist(), num_tokens]).tolist(),
                "forward_mode": mode,
                "topk_ids_of_layer": slots_HTK,
                "misc_objects": [],
                "global_physical_count": count_HE.astype(np.int32),
            }
        )
    mapping = sglang_recorder.trivial_map(num_hidden, spec.num_experts)
    torch_file.save({"records": records, "last_physical_to_logical_map": mapping}, out)
    return [
        "sglang_per_token has no weights, logits, embeddings, tasks or names of requests",
        f"{num_hidden} layers, -1 in those without experts; one rank, slot e holds expert e",
    ]
