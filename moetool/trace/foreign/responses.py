"""Common parts of SGLang's and vLLM's routed experts: files of responses, with rows for every layer.

A file holds one response, a JSON list of responses, or one response per line.
"""

import base64
import binascii
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, first_line
from moetool.base.tables import numbered
from moetool.base.types import ModelSpec
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers, require_even, with_dense, without_dense
from moetool.trace.foreign.routes import Routes, RouteSequence, check, prompt_rows, whole_requests
from moetool.trace.reader import Trace

NOTES = [
    "top-k only: no weights, no scores over all experts, no embeddings",
    "the file does not record which requests ran together: they are imported one after the other",
]


def field(where: str, holder: Any, name: str, kind: type) -> Any:
    """Return an optional field of the given type (None where missing); numbers count tokens.

    Raises:
        MismatchError: it has another type.
    """
    value = holder.get(name) if isinstance(holder, dict) else None
    if value is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and not 0 <= value < 2**31):
        raise MismatchError(f"{where} has {name} {str(value)[:40]!r}, expected {kind.__name__}")
    return value


def decoded(where: str, text: str) -> bytes:
    """Return the bytes of a base64 text. Raises: MismatchError: it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MismatchError(f"{where} has routed_experts that are not base64 ({error}); it is cut off") from None


def reused_tokens(where: str, usage: Any) -> int:
    """Return the prompt tokens that an engine took from its cache, by its usage (OpenAI's or SGLang's form)."""
    details = field(where, usage, "prompt_tokens_details", dict)
    return field(where, details, "cached_tokens", int) or field(where, usage, "cached_tokens", int) or 0


def experts(where: str, value: Any, facts: ModelFacts) -> np.ndarray:
    """Return experts_THK of a nested list, or of base64 of an `.npy` file or of raw int32; -1 in blank rows.

    Raises:
        MismatchError: it is damaged, or its rows differ in shape.
        UsageError: the layers or top-k of raw bytes are not given.
    """
    if isinstance(value, list):
        return nested(where, value)
    if not isinstance(value, str):
        raise MismatchError(f"{where} has routed_experts {str(value)[:40]!r}, expected a list or base64")
    raw = decoded(where, value)
    return npy(where, raw) if raw.startswith(b"\x93NUMPY") else raw_int32(where, raw, facts)


def raw_int32(where: str, raw: bytes, facts: ModelFacts) -> np.ndarray:
    """Return experts_THK of SGLang's bytes, which lack their shape.

    Raises:
        MismatchError: their number does not fit the model.
        UsageError: the layers or top-k are not given.
    """
    num_hidden, top_k = facts.said(where, "num_hidden_layers", "top_k"), facts.said(where, "top_k")
    if not raw or len(raw) % (4 * num_hidden * top_k):
        raise MismatchError(
            f"{where} has {len(raw):,} bytes of routed experts, expected a multiple of {4 * num_hidden * top_k:,}: "
            f"int32 for {num_hidden} layers and top-{top_k}; it is cut off, or of another model"
        )
    return np.frombuffer(raw, "<i4").reshape(-1, num_hidden, top_k)


def npy(where: str, raw: bytes) -> np.ndarray:
    """Return experts_THK int64 of a `.npy` file; its header is checked against its length before allocation.

    Raises:
        MismatchError: it is damaged, or no array of whole numbers with three dimensions.
    """
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = reads[version](stream)
    except Exception as error:  # NumPy reads the header with Python's tokenizer and raises any of its errors
        raise MismatchError(f"{where} has routed_experts that are not an .npy file ({first_line(error)})") from None
    left = len(raw) - stream.tell()
    whole = dtype.itemsize * int(np.prod(shape, dtype=object))
    if len(shape) != 3 or dtype.kind not in "iu" or fortran or left != whole or not whole:
        raise MismatchError(
            f"{where} has routed_experts of {dtype} {shape} in {left:,} bytes, expected whole numbers (tokens, layers, "
            f"top_k); it is cut off or no routed experts"
        )
    return np.frombuffer(raw, dtype, offset=stream.tell()).reshape(shape).astype(np.int64)


def nested(where: str, rows: list[Any]) -> np.ndarray:
    """Return experts_THK of a nested list; null or [] becomes -1.

    Raises:
        MismatchError: its rows differ in shape, or hold other values.
    """
    first = next((row for row in rows if row), None)
    shape = np.shape(first) if isinstance(first, list) and _is_even(first) else ()
    if len(shape) != 2:
        raise MismatchError(f"{where} has routed_experts {str(rows)[:40]!r}, expected tokens, layers and experts")
    blank = np.full(shape, -1).tolist()
    try:
        found = np.array([row or blank for row in rows])
    except ValueError:
        found = np.zeros(0)
    if found.shape != (len(rows), *shape) or found.dtype.kind not in "iu" or found.min() < -1:
        raise MismatchError(
            f"{where} has routed_experts of uneven rows or other values, expected {shape[0]} layers x {shape[1]} whole "
            f"numbers from 0 for each token, or -1"
        )
    return found.astype(np.int64)


def _is_even(rows: list[Any]) -> bool:
    return all(isinstance(row, list) for row in rows) and len({len(row) for row in rows}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text of one answer.

    Attributes:
        prompt_tokens: the engine's count of prompt tokens.
        new_tokens: number of new tokens in this answer; if None, the rows must begin with the prompt.
        token_ids: token ids of prompt and answer.
        reused_tokens: tokens of the prompt's beginning that the engine took from its cache and did not forward.
        task: task of this answer, if the file has several.
    """

    prompt_tokens: int | None
    new_tokens: int | None
    token_ids: list[int] | None = None
    reused_tokens: int = 0
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One answer: its routes and model, the position of the first row, and the rows left out as reused or blank.

    Attributes:
        notes: on facts of the model that the file does not tell.
    """

    sequence: RouteSequence
    spec: ModelSpec
    start: int
    reused: int
    blank: int
    notes: list[str]


def sequence(where: str, name: str, experts_THK: np.ndarray, facts: ModelFacts, answer: Answer) -> RecordedAnswer:
    """Return the routes of one answer.

    There is one row less than tokens, since the last token is never forwarded. Further missing rows are those at the
    beginning that the client did not request. Rows of reused tokens repeat those of an earlier answer and are left out,
    as are blank ones (-1).

    Raises:
        MismatchError: the numbers of rows and tokens do not fit, or no row is left.
    """
    num_rows, num_hidden, top_k = experts_THK.shape
    layers = facts.layers_of(where, num_hidden)
    num_experts, notes = facts.num_experts_or(experts_THK)
    spec = facts.spec_of(where, layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers))
    start, prompt_tokens = 0, answer.prompt_tokens
    if prompt_tokens is not None:
        start = prompt_tokens + answer.new_tokens - 1 - num_rows if answer.new_tokens is not None else 0
        if not 0 <= start <= prompt_tokens or not num_rows or num_rows < prompt_tokens - start:
            new = f" and {answer.new_tokens} new ones" if answer.new_tokens else ""
            raise MismatchError(
                f"{where} has {num_rows} rows for {prompt_tokens} prompt tokens{new}, expected one less; request it "
                f"again"
            )
    position_T = np.arange(start, start + num_rows, dtype=np.int32)
    blank_T = (experts_THK[:, list(layers)] == -1).all(axis=(1, 2))
    reused_T = position_T < answer.reused_tokens
    keep_T = ~(blank_T | reused_T)
    if not keep_T.any():
        raise MismatchError(f"{where} has no token with experts that was forwarded, expected some; request it again")
    dense = [layer for layer in range(num_hidden) if layer not in layers]
    experts_THK = experts_THK[keep_T]
    experts_THK[:, dense] = np.maximum(experts_THK[:, dense], 0)  # blank is -1 or 0
    experts_TS = without_dense(where, experts_THK, layers)
    check(where, spec, experts_TS, None, all_layers=True)
    ids = answer.token_ids
    token_id_T = None
    if ids is not None and len(ids) >= start + num_rows:
        token_id_T = np.array(ids[start : start + num_rows], np.int32)[keep_T]
    prompt_rows = None if prompt_tokens is None else int(np.count_nonzero(position_T[keep_T] < prompt_tokens))
    sequence = RouteSequence(
        name=name,
        prompt_tokens=prompt_rows,
        experts_TS=experts_TS.astype(np.uint16),
        token_id_T=token_id_T,
        position_T=position_T[keep_T],
        new_tokens=None if prompt_tokens is None else num_rows + 1 - max(prompt_tokens - start, 0),
        task=answer.task,
    )
    return RecordedAnswer(
        sequence=sequence,
        spec=spec,
        start=start,
        reused=int(reused_T.sum()),
        blank=int((blank_T & ~reused_T).sum()),
        notes=notes,
    )


def routes(path: Path, found: list[RecordedAnswer]) -> Routes:
    """Return all answers of a file."""
    widest = max(found, key=lambda one: one.spec.num_experts)
    notes = [*NOTES, *widest.notes]
    if late := [one.sequence.name for one in found if one.start]:
        notes.append(
            f"the prompts of {len(late):,} of {numbered(len(found), 'answer')}, such as {late[0]}, were recorded from "
            "a later position: their earlier tokens are missing"
        )
    if any(one.sequence.prompt_tokens is None for one in found):
        notes.append("responses without a usage do not mark the first new token")
    if reused := sum(one.reused for one in found):
        notes.append(
            f"{reused:,} rows of prompt tokens that the engine took from its cache are left out: no forward ran, and "
            f"they repeat the routes of an earlier answer"
        )
    if blank := sum(one.blank for one in found):
        notes.append(f"{blank:,} tokens without experts (blank rows) left out")
    return Routes(spec=widest.spec, task=path.stem, sequences=[one.sequence for one in found], notes=notes)


def write_responses(
    trace: Trace,
    out: Path,
    format: str,
    num_hidden_layers: int | None,
    response_of: Callable[[str, np.ndarray, int, int], dict[str, Any]],
) -> list[str]:
    """Write one response per line.

    Args:
        response_of: makes a response from id, experts_THK int32, prompt tokens and new tokens.
    """
    require_even(trace.spec, format)
    num_layers = hidden_layers(trace.spec, num_hidden_layers)
    with out.open("w", encoding="utf-8", newline="\n") as file:
        for response in _responses(trace, num_layers, response_of):
            file.write(json.dumps(response, ensure_ascii=False) + "\n")
    return [
        f"{format} has no weights, logits, embeddings or tasks, and does not record which requests ran together",
        "no token ids are written: a trace lacks that of an answer's last token, which was not forwarded",
        f"{num_layers} layers, zeros in those without experts; an answer's number of new tokens includes the last one, "
        f"which has no row",
    ]


def _responses(
    trace: Trace, num_layers: int, response_of: Callable[[str, np.ndarray, int, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for row, rows in whole_requests(trace):
        start, num_rows = int(rows.position_T[0]), len(rows)
        if not np.array_equal(rows.position_T, np.arange(start, start + num_rows)):
            raise MismatchError(f"request {row['request']} has gaps in its positions, expected none; capture again")
        prompt = start + prompt_rows(rows)
        experts_THK = with_dense(trace.spec, rows.experts_TS, num_layers)
        yield response_of(row["prompt_id"], experts_THK, prompt, start + num_rows + 1 - prompt)
