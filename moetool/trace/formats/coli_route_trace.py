"""colibri's `ROUTE_TRACE`: a line for each row of each call of a MoE layer.

    <call> <row> <layer> <expert>:<weight> <expert>:<weight> …

A call is one layer of one forward. Prompts are not marked: a forward of more than eight rows counts as a chunk of a
prompt (colibri verifies at most eight drafts at once). Requests follow from `moetool.trace.foreign.layer_runs`. Rows of
a draft head (MTP), whose layer follows the model's last one, are left out where `num_hidden_layers` is given.

Source: github.com/JustVugg/colibri, c/route_trace.h.
"""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.layer_runs import LayerRows, by_token
from moetool.trace.foreign.model_facts import ModelFacts, require_even
from moetool.trace.foreign.routes import Routes, whole_requests
from moetool.trace.reader import Trace

_LINE = re.compile(r"\d+ \d+ \d+( \d+:-?(\d+\.\d+|nan|inf))+")
_MOST_DRAFTS = 8


def recognize(sample: FileSample) -> str | None:
    """Recognize lines of that form."""
    if sample.lines and all(_LINE.fullmatch(line.strip()) for line in sample.lines):
        return "lines of <call> <row> <layer> <expert>:<weight> …"
    return None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, not such a file, or of another model than the given one.
        UsageError: the number of experts or their bytes are not given.
    """
    heads_R3, experts_RK, weights_RK = _rows(path)
    notes = [
        "top-k only: no scores over all experts, no embeddings, no token ids; weights have four decimals",
        f"the prompt is not marked: forwards of more than {_MOST_DRAFTS} tokens are taken to be of a prompt",
    ]
    limit = facts.known("num_hidden_layers")
    if limit is not None and (drafts_R := heads_R3[:, 2] >= limit).any():
        notes.append(f"{drafts_R.sum()} rows of a draft head (layers from {limit} on) are left out")
        heads_R3, experts_RK, weights_RK = (rows[~drafts_R] for rows in (heads_R3, experts_RK, weights_RK))
    if not len(heads_R3):
        raise MismatchError(f"{path} has no row below layer {limit}; name the right num_hidden_layers")
    _check_calls(path, heads_R3)
    layer_rows = LayerRows(
        layer_R=heads_R3[:, 2], experts_RK=experts_RK, weights_RK=weights_RK, most_drafts=_MOST_DRAFTS
    )
    return by_token(path, layer_rows).routes(path, facts, notes, with_forwards=True)


def _rows(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return call, row and layer int64 [R, 3], experts int64 [R, K] and weights float32 [R, K]."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise MismatchError(
            f"{path} is not ASCII text, expected lines of <call> <row> <layer> <expert>:<weight> …"
        ) from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise MismatchError(f"{path} has no lines, expected those of a run with ROUTE_TRACE; run the engine again")
    wide = 3 + 2 * lines[0].count(":")
    for at, line in enumerate(lines, 1):
        if not _LINE.fullmatch(line.strip()) or 3 + 2 * line.count(":") != wide:
            raise MismatchError(
                f"{path}, line {at} is {line[:60]!r}, expected <call> <row> <layer> and {(wide - 3) // 2} "
                f"<expert>:<weight>; it is cut off or damaged"
            )
    cells_RW = np.array(" ".join(lines).replace(":", " ").split(), np.float64).reshape(len(lines), wide)
    numbers_RW = np.nan_to_num(cells_RW)
    heads_R3 = numbers_RW[:, :3].astype(np.int64)
    return heads_R3, numbers_RW[:, 3::2].astype(np.int64), cells_RW[:, 4::2].astype(np.float32)


def _check_calls(path: Path, heads_R3: np.ndarray) -> None:
    """Raise MismatchError if calls go back, or a call's rows are not 0, 1, 2, …"""
    call_R, row_R, layer_R = heads_R3.T
    new_R = np.diff(call_R, prepend=call_R[0] - 1) != 0
    start_R = np.maximum.accumulate(np.where(new_R, np.arange(len(call_R)), 0))
    wrong_R = row_R != np.arange(len(call_R)) - start_R
    wrong_R[1:] |= np.diff(call_R) < 0
    wrong_R[1:] |= ~new_R[1:] & (np.diff(layer_R) != 0)
    if wrong_R.any():
        at = int(np.argmax(wrong_R))
        raise MismatchError(
            f"{path}: call {call_R[at]}, row {row_R[at]} of layer {layer_R[at]} is out of order, expected the rows of "
            f"each call from 0; lines are missing or mixed"
        )


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace, each request a prompt in one forward and then a forward for each new token.

    Raises:
        MismatchError: the trace has no weights, or layers of different shape.
    """
    spec = trace.spec
    require_even(spec, "coli_route_trace")
    trace.require(["weights"], "coli_route_trace")
    call = 0
    with out.open("w", encoding="ascii", newline="\n") as file:
        for _, rows in whole_requests(trace, ["weights"]):
            assert rows.weights_TS is not None
            shape = len(rows), spec.num_layers, -1
            experts_TLK, weights_TLK = rows.experts_TS.reshape(shape), rows.weights_TS.reshape(shape)
            edges = [0, *(np.flatnonzero(np.diff(rows.iteration_T)) + 1).tolist(), len(rows)]
            for start, stop in pairwise(edges):
                for place, layer in enumerate(spec.layer_ids_L):
                    for row, token in enumerate(range(start, stop)):
                        pairs = zip(experts_TLK[token, place].tolist(), weights_TLK[token, place].tolist(), strict=True)
                        chosen = " ".join(f"{expert}:{weight:.4f}" for expert, weight in pairs)
                        file.write(f"{call} {row} {layer} {chosen}\n")
                    call += 1
    return ["coli_route_trace does not mark prompts or requests; weights have four decimals"]
