"""Route traces of BigMoeOnEdge: CSV with one row for each expert that a token uses in a layer.

    # route_trace v1
    # model=… arch=… n_layer=… n_expert=… n_expert_used=…
    # layer=0 expert_bytes=… dense_bytes=…
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes

Source: github.com/Helldez/BigMoeOnEdge, docs/bench-data/2026-07-15-route-trace. A step is a token; phase 0 is the
prompt. `residency` and the column `expert_bytes` (0 for a hit) describe that runtime's own cache and are not imported.
The bytes of an expert are those of the header, which differ by layer in mixed quantizations.

That runtime computes a prompt's last layer for the last token only, so the other prompt tokens have no experts there.
In the trace they repeat the experts of a later prompt token with weight 0, so that the layer's event is as recorded.
"""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers, require_even, spec_from_routes
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

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_USED = 6  # the columns before `weight`, all whole numbers
_MAGIC = "# route_trace v1"
_MODEL = re.compile(r"# model=(.+) arch=(\S+) n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)")
_LAYER = re.compile(r"# layer=(\d+) expert_bytes=(\d+)\b")
_LONGEST = 18  # digits that fit 64 bits


def recognize(sample: FileSample) -> str | None:
    """Recognize the first line."""
    return f"it begins with {_MAGIC!r}" if sample.lines[:1] == [_MAGIC] else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file; each turn of the conversation is a sequence.

    Raises:
        MismatchError: it is damaged, not such a file, or of another model than the given one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise MismatchError(f"{path} is not text ({error.reason}), expected a CSV file of routes") from None
    num_header = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    spec = facts.adopt(path, _spec(path, lines[:num_header]))
    rows_R6, weight_R = _rows(path, lines[num_header:], num_header + 1)
    notes = [
        "top-k only: no scores over all experts, no embeddings, no token ids",
        "the file lacks the hidden size and the shared experts",
        "the state of the runtime's own cache (residency, expert_bytes of a row) is left out",
    ]
    order = rows_R6[:, 0]
    if (np.diff(order) < 0).any():
        raise MismatchError(f"{path} goes back to an earlier turn, expected them in order; rows are mixed")
    sequences = [
        _turn(path, spec, int(turn), rows_R6[order == turn], weight_R[order == turn], notes)
        for turn in np.unique(order)
    ]
    if len(sequences) > 1:
        notes.append("each turn of the conversation is a request of its own")
    last_TS = np.concatenate([s.weights_TS[-1:] for s in sequences if s.weights_TS is not None])
    spec = renormalized(spec, facts, last_TS)
    return Routes(spec=spec, task="conversation", sequences=sequences, notes=notes)


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace, each request as a turn; return notes on values that the trace lacks.

    Prompt tokens whose last layer has weight 0 throughout have no rows there, as in the files of that runtime.

    Raises:
        MismatchError: the trace has no weights, or layers of different shape.
        UsageError: `num_hidden_layers` is too small.
    """
    spec = trace.spec
    require_even(spec, "route_csv")
    trace.require(["weights"], "route_csv")
    num_layers, top_k = hidden_layers(spec, num_hidden_layers), spec.top_k_L[0]
    sizes = dict(zip(spec.layer_ids_L, spec.expert_bytes_L, strict=True))
    with out.open("w", encoding="utf-8", newline="\n") as file:
        file.write(
            f"{_MAGIC}\n# model={spec.name} arch=unknown n_layer={num_layers} n_expert={spec.num_experts} "
            f"n_expert_used={top_k}\n"
        )
        for layer in range(num_layers):
            file.write(f"# layer={layer} expert_bytes={sizes.get(layer, 0)} dense_bytes=0\n")
        file.write(",".join(_COLUMNS) + "\n")
        for turn, (_, rows) in enumerate(whole_requests(trace, ["weights"])):
            assert rows.weights_TS is not None
            shape = len(rows), spec.num_layers, top_k
            experts, weights = rows.experts_TS.reshape(shape), rows.weights_TS.reshape(shape)
            known, place = np.unique(weights, return_inverse=True)
            texts = np.array([np.format_float_positional(weight, trim="-") for weight in known])[place.reshape(shape)]
            prompt = prompt_rows(rows)
            for token, layer in run_order(spec.num_layers, prompt, len(rows)):
                if token < prompt - 1 and layer == spec.num_layers - 1 and not weights[token, layer].any():
                    continue
                layer_id = spec.layer_ids_L[layer]
                head, tail = f"{turn},{int(token >= prompt)},{token},{layer_id}", f"0,{sizes[layer_id]}"
                for slot, (expert, text) in enumerate(zip(experts[token, layer], texts[token, layer], strict=True)):
                    file.write(f"{head},{slot},{expert},{text},{tail}\n")
    return [
        "arch and dense_bytes are not known: written as unknown and 0",
        "residency and expert_bytes of the rows are those of a runtime without a cache",
        "route_csv does not mark requests that ran together, nor their tasks",
    ]


def _spec(path: Path, header: list[str]) -> ModelSpec:
    if not header or header[0].strip() != _MAGIC:
        first = header[0][:40] if header else ""
        raise MismatchError(f"{path} begins with {first!r}, expected {_MAGIC!r}; is it a route CSV?")
    if (match := next(filter(None, map(_MODEL.match, header)), None)) is None:
        raise MismatchError(f"{path} has no line '# model=… arch=… n_layer=… n_expert=… n_expert_used=…' in its header")
    name = re.split(r"[/\\]", match[1])[-1].removesuffix(".gguf")
    num_layers, num_experts, top_k = (int(match[i]) for i in (3, 4, 5))
    sizes = {int(found[1]): int(found[2]) for found in map(_LAYER.match, header) if found}
    layers = tuple(layer for layer in sorted(sizes) if sizes[layer])
    if not layers or layers[-1] >= num_layers or not 0 < top_k <= num_experts:
        raise MismatchError(
            f"{path} has expert_bytes for {len(layers)} layers and top-{top_k} of {num_experts} experts in its header, "
            f"expected a line '# layer=… expert_bytes=…' for each MoE layer of {num_layers}; download it again"
        )
    expert_bytes = tuple(sizes[layer] for layer in layers)
    facts = {"layers": layers, "num_experts": num_experts, "top_k": top_k, "expert_bytes": expert_bytes}
    return spec_from_routes(
        name,
        facts,
        layer_ids_L=layers,
        num_experts_L=(num_experts,) * len(layers),
        top_k_L=(top_k,) * len(layers),
        expert_bytes_L=expert_bytes,
    )


def _rows(path: Path, lines: list[str], first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return turn, phase, step, layer, slot, expert of each row, int64 [R, 6], and its weight, float32 [R]."""
    names = tuple(lines[0].split(",")) if lines else ()
    if names != _COLUMNS:
        raise MismatchError(f"{path} has the columns {', '.join(names) or 'none'}, expected {', '.join(_COLUMNS)}")
    numbers, weights = [], []
    for at, line in enumerate(lines[1:], first + 1):
        row = line.split(",")
        try:
            if len(row) != len(_COLUMNS) or max(map(len, row[:_USED])) > _LONGEST:
                raise ValueError
            numbers.append([int(value) for value in row[:_USED]])
            weights.append(float(row[_USED]))
        except ValueError:
            raise MismatchError(
                f"{path}, line {at}: {line[:80]!r}, expected {len(_COLUMNS)} numbers; the file is cut off or damaged"
            ) from None
    if not numbers:
        raise MismatchError(f"{path} has no rows after its header; download it again")
    return np.array(numbers), np.array(weights, np.float32)


def _turn(
    path: Path, spec: ModelSpec, turn: int, rows_R6: np.ndarray, weight_R: np.ndarray, notes: list[str]
) -> RouteSequence:
    """Return one turn: its tokens in order, with missing rows of a prompt's last layer filled in."""
    where, top_k = f"{path}, turn {turn}", spec.top_k_L[0]
    _, phase_R, step_R, layer_R, slot_R, expert_R = rows_R6.T
    index = {layer: i for i, layer in enumerate(spec.layer_ids_L)}
    for name, column, allowed in (
        ("layer", layer_R, index),
        ("slot", slot_R, range(top_k)),
        ("phase", phase_R, (0, 1)),
    ):
        if unknown := sorted(set(np.unique(column).tolist()) - set(allowed)):
            raise MismatchError(f"{where} has {name} {unknown[0]}, which its header does not; the file is damaged")
    steps = np.unique(step_R)
    num_tokens = len(steps)
    if steps[-1] - steps[0] + 1 != num_tokens:
        missing = next(before + 1 for before, after in pairwise(steps.tolist()) if after != before + 1)
        raise MismatchError(f"{where} has no step {missing}, expected every one up to {steps[-1]}; rows are missing")
    token_R = step_R - steps[0]
    shape = num_tokens, spec.num_layers, top_k
    place = token_R, np.array([index[layer] for layer in layer_R.tolist()]), slot_R
    experts, weights, times = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    experts[place], weights[place] = expert_R, weight_R
    np.add.at(times, place, 1)
    prompt_tokens = num_tokens - len(np.unique(token_R[phase_R == 1]))
    if token_R[phase_R == 0].max(initial=-1) != prompt_tokens - 1:
        raise MismatchError(f"{where} has new tokens (phase 1) before its prompt (phase 0); rows are missing or mixed")
    wrong_TL = (times != 1).any(axis=2)
    before = max(prompt_tokens - 1, 0)
    wrong_TL[:before, -1] &= times[:before, -1].any(axis=1)  # these rows may be absent
    if wrong_TL.any():
        at, layer = np.argwhere(wrong_TL)[0]
        raise MismatchError(
            f"{where}, step {steps[at]}, layer {spec.layer_ids_L[layer]} has {times[at, layer].sum()} rows, expected "
            f"one for each of {top_k} slots; the file is cut off or damaged"
        )
    absent = np.flatnonzero(~times[:prompt_tokens, -1].any(axis=1))
    for token in absent[::-1]:
        experts[token, -1] = experts[token + 1, -1]
    if len(absent):
        notes.append(
            f"turn {turn}: {len(absent)} of {prompt_tokens} prompt tokens have no experts in layer "
            f"{spec.layer_ids_L[-1]} in the file; they repeat those of a later one, with weight 0, so that the union "
            f"of the prompt is as recorded"
        )
    experts_TS, weights_TS = experts.reshape(num_tokens, -1), weights.reshape(num_tokens, -1).astype(np.float16)
    check(where, spec, experts_TS, weights_TS)
    return RouteSequence(
        name=str(turn),
        prompt_tokens=prompt_tokens,
        experts_TS=experts_TS.astype(np.uint16),
        weights_TS=weights_TS,
        position_T=None if prompt_tokens else steps.astype(np.int32),
    )
