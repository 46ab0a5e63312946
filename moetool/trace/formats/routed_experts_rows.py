"""Rollouts as JSON objects with `routed_experts` at their top level: one per line, a list, or one object.

`routed_experts` is a nested list [T][H][K], or base64 of an `.npy` file or of raw int32 (as SGLang's; with the layers
and top-k given). It has a row for every layer of the model and for each token but the last, which is never forwarded;
or for all tokens. Blank rows (null, [] or -1) are left out. Optional beside it: `prompt_ids` or `prompt_length`,
`response_ids` or `response_length`, or `input_ids` of both, and `id`, `task`, in the names that trainers use.
`token_ids` are of the answer, or of both if there are as many as rows (or one more), or as both lengths add up to.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import responses
from moetool.trace.foreign.file_sample import FileSample, read_objects
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.responses import Answer, field
from moetool.trace.foreign.routes import Routes

_PROMPT_IDS = ("prompt_token_ids", "prompt_ids")
_NEW_IDS = ("response_token_ids", "response_ids", "completion_ids", "output_ids", "output_token_ids", "token_ids")
_ALL_IDS = ("input_ids", "tokens")
_PROMPT = ("prompt_tokens", "prompt_length", "prompt_len")
_NEW = ("completion_tokens", "response_length", "response_len", "completion_length")
_NAMES = ("id", "request_id", "uid", "rid", "sample_id", "index")
_TASKS = ("task", "dataset", "data_source")


def recognize(sample: FileSample) -> str | None:
    """Recognize an object with a list or text `routed_experts`."""
    held = isinstance(sample.first_object.get("routed_experts"), list | str)
    return "JSON with routed_experts in each object" if held else None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file; each object is a sequence.

    Raises:
        MismatchError: an object is damaged or has no routed experts, or the model is another one.
        UsageError: the layers or top-k of raw bytes are not given.
    """
    return responses.routes(path, [_read(where, i, row, facts) for i, (where, row) in enumerate(read_objects(path))])


def _read(where: str, i: int, row: dict[str, Any], facts: ModelFacts) -> responses.RecordedAnswer:
    if row.get("routed_experts") is None:
        raise MismatchError(f"{where} has no routed_experts, expected them in each object")
    experts_THK = responses.experts(where, row["routed_experts"], facts)
    prompt_ids, new_ids, every = (_ids(where, row, names) for names in (_PROMPT_IDS, _NEW_IDS, _ALL_IDS))
    prompt, new = (_first(where, row, names, int) for names in (_PROMPT, _NEW))
    prompt = len(prompt_ids) if prompt_ids is not None else prompt
    if every is None and prompt is not None and new_ids is not None and new_ids == row.get("token_ids"):
        both = len(new_ids) == prompt + new if new is not None else 0 <= len(new_ids) - len(experts_THK) <= 1
        if both and len(new_ids) >= prompt and new_ids[:prompt] == (prompt_ids or new_ids[:prompt]):
            every, prompt_ids, new_ids, new = new_ids, new_ids[:prompt], new_ids[prompt:], len(new_ids) - prompt
    new = len(new_ids) if new_ids is not None else new
    if prompt_ids is not None and new_ids is not None:
        every = prompt_ids + new_ids
    if every is not None and prompt is not None and new is None:
        new = len(every) - prompt
    if prompt is not None and new and len(experts_THK) == prompt + new:
        experts_THK = experts_THK[:-1]  # the program repeats or fills the row of the last token, which never ran
    names = [row[name] for name in _NAMES if isinstance(row.get(name), str | int)]
    return responses.sequence(
        where,
        str(names[0]) if names else str(i),
        experts_THK,
        facts,
        Answer(
            prompt_tokens=prompt,
            new_tokens=new,
            token_ids=every,
            reused_tokens=field(where, row, "cached_tokens", int) or 0,
            task=_first(where, row, _TASKS, str),
        ),
    )


def _first(where: str, row: dict[str, Any], names: tuple[str, ...], kind: type) -> Any:
    return next((value for name in names if (value := field(where, row, name, kind)) is not None), None)


def _ids(where: str, row: dict[str, Any], names: tuple[str, ...]) -> list[int] | None:
    ids: list[int] | None = _first(where, row, names, list)
    if ids is not None and not np.all([type(one) is int and 0 <= one < 2**31 for one in ids]):
        raise MismatchError(f"{where} has {names[0]} or a like field that are not token ids, expected numbers from 0")
    return ids
