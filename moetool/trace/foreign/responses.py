"""Common parts of SGLang's and vLLM's routed experts: files of responses, with rows for every layer.

A file holds one response, a JSON list of responses, or one response per line.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers, require_even, with_dense, without_dense
from moetool.trace.foreign.routes import Routes, RouteSequence, check, prompt_rows, whole_requests

if TYPE_CHECKING:
    from moetool.trace.reader import Trace

NOTES = [
    "top-k only: no weights, no scores over all experts, no embeddings",
    "the file does not record which requests ran together: they are imported one after the other",
]


def read_responses(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return every response of a file, with its place for messages.

    Raises:
        MismatchError: the file is not text, or not JSON; the error names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MismatchError(f"{path} is not text ({error.reason}), expected JSON responses") from None
    try:
        whole = json.loads(text)
        every = whole if isinstance(whole, list) else [whole]
        responses = [(f"{path}, response {i}", response) for i, response in enumerate(every)]
    except (ValueError, RecursionError):
        responses = []
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    responses.append((f"{path}, line {i}", json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise MismatchError(f"{path}, line {i} is not JSON ({error}); the file is cut off") from None
    for where, response in responses:
        if not isinstance(response, dict):
            raise MismatchError(f"{where} is {str(response)[:40]!r}, expected a JSON object")
    if not responses:
        raise MismatchError(f"{path} has no response, expected some; download it again")
    return responses


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
    """Return the bytes of a base64 text.

    Raises:
        MismatchError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MismatchError(f"{where} has routed_experts that are not base64 ({error}); it is cut off") from None


def sequence(
    where: str,
    name: str,
    experts_THK: np.ndarray,
    facts: ModelFacts,
    *,
    prompt_tokens: int | None,
    new_tokens: int | None,
    token_ids: list[int] | None = None,
) -> tuple[RouteSequence, ModelSpec, int]:
    """Return the routes of one answer, its model, and the position of the first row.

    There is one row less than tokens, since the last token is never forwarded. Further missing rows are those at the
    beginning that the client did not request.

    Args:
        prompt_tokens: the engine's count of prompt tokens.
        new_tokens: number of new tokens in this answer; if None, the rows must begin with the prompt.
        token_ids: token ids of prompt and answer.

    Raises:
        MismatchError: the numbers of rows and tokens do not fit, or no row is of the prompt.
    """
    num_rows, num_hidden, top_k = experts_THK.shape
    layers = facts.layers_of(where, num_hidden)
    spec = facts.spec_of(where, layers=layers, top_k_L=[top_k] * len(layers))
    start = 0
    if prompt_tokens is not None:
        start = prompt_tokens + new_tokens - 1 - num_rows if new_tokens is not None else 0
        if start < 0 or num_rows < prompt_tokens - start:
            tokens = f"{prompt_tokens} prompt tokens" + (f" and {new_tokens} new ones" if new_tokens else "")
            raise MismatchError(f"{where} has {num_rows} rows for {tokens}, expected one less; request it again")
        if start >= prompt_tokens:
            raise MismatchError(
                f"{where} has no row of its prompt of {prompt_tokens} tokens; ask for the routes from its beginning"
            )
    experts_TS = without_dense(where, experts_THK, layers)
    check(where, spec, experts_TS, None)
    ids = None
    if token_ids is not None and len(token_ids) > start + num_rows:
        ids = np.array(token_ids[start : start + num_rows], np.int32)
    return (
        RouteSequence(
            name=name,
            prompt_tokens=None if prompt_tokens is None else prompt_tokens - start,
            experts_TS=experts_TS.astype(np.uint16),
            token_id_T=ids,
            position_T=np.arange(start, start + num_rows, dtype=np.int32),
            new_tokens=None if prompt_tokens is None else num_rows + 1 - (prompt_tokens - start),
        ),
        spec,
        start,
    )


def routes(path: Path, found: list[tuple[RouteSequence, ModelSpec, int]]) -> Routes:
    """Return all answers of a file."""
    sequences, spec = [one for one, _, _ in found], found[0][1]
    notes = list(NOTES)
    if any(start for _, _, start in found):
        notes.append("some prompts were recorded from a later position: their earlier tokens are missing")
    if any(one.prompt_tokens is None for one in sequences):
        notes.append("responses without a usage do not mark the first new token")
    return Routes(spec=spec, task=path.stem, sequences=sequences, notes=notes)


def write_responses(
    trace: "Trace",
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
        f"{num_layers} layers, zeros in those without experts; an answer's number of new tokens includes the last one, "
        f"which has no row",
    ]


def _responses(
    trace: "Trace", num_layers: int, response_of: Callable[[str, np.ndarray, int, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for row, rows in whole_requests(trace):
        start, num_rows = int(rows.position_T[0]), len(rows)
        if not np.array_equal(rows.position_T, np.arange(start, start + num_rows)):
            raise MismatchError(f"request {row['request']} has gaps in its positions, expected none; capture again")
        prompt = start + prompt_rows(rows)
        experts_THK = with_dense(trace.spec, rows.experts_TS, num_layers)
        yield response_of(row["prompt_id"], experts_THK, prompt, start + num_rows + 1 - prompt)
