"""Identity of prompts by content, independent of file names and ids."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

_LENGTH = 24  # hexadecimal digits of a digest


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """Return the identity of a prompt with these tokens."""
    return _named("tokens", hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()))


def prompt_digests(trace: Trace, requests: Collection[int] | None = None) -> dict[int, frozenset[str]]:
    """Return the identity of each request's prompt: its tokens, if recorded, and its experts.

    The experts (a set per token and layer) identify a prompt if one of the traces withholds its tokens. This fails if a
    tie was resolved differently, for example at another batch size. A request without prompt rows is identified by all
    its rows.

    Args:
        requests: requests to include (default: all).

    Raises:
        MismatchError: the trace is damaged.
    """
    held: dict[int, list[Any]] = {}  # by request and part: whether all ids are there, digests of ids and experts
    parts: dict[int, set[bool]] = {}
    for rows in trace.batches():
        for request in np.unique(rows.request_T).tolist():
            if requests is not None and request not in requests:
                continue
            mine = rows.select(rows.request_T == request)
            for prompt in (True, False):
                part = mine.select((mine.iteration_T == 0) == prompt)
                if not len(part):
                    continue
                parts.setdefault(request, set()).add(prompt)
                key = 2 * request + prompt
                whole, ids, experts = held.setdefault(key, [True, hashlib.sha256(), hashlib.sha256()])
                held[key][0] = whole and bool((part.token_id_T >= 0).all())
                ids.update(part.token_id_T.astype("<i4").tobytes())
                experts.update(_sorted_experts(trace.spec, part).astype("<u2").tobytes())
    found = {}
    for request, there in parts.items():
        whole, ids, experts = held[2 * request + (True in there)]
        names = [_named("experts", experts)]
        found[request] = frozenset([*names, _named("tokens", ids)] if whole else names)
    return found


def repeated(trace: Trace, seen_prompts: Collection[str]) -> frozenset[int]:
    """Return the requests of a trace whose prompts are among these, by `prompt_digests` or as `dataset/prompt_id`.

    Args:
        seen_prompts: digests of the training prompts in a predictor's card; older cards hold names instead.
    """
    seen = set(seen_prompts)
    named = {row["request"] for row in trace.requests.to_pylist() if f"{row['dataset']}/{row['prompt_id']}" in seen}
    return frozenset(named | {request for request, known in prompt_digests(trace).items() if known & seen})


def trained_on(trace: Trace, card: Mapping[str, Any]) -> frozenset[int]:
    """Return the requests of a trace whose prompts a predictor has seen in training or validation, by its card.

    Reads the trace, unless the predictor was trained on it.
    """
    if card["trace"]["sha256"] == trace.sha256:
        return frozenset([*card["requests"]["train"], *card["requests"]["validation"]])
    return repeated(trace, card["seen_prompts"])


def _sorted_experts(spec: ModelSpec, rows: TokenBatch) -> np.ndarray:
    """Return experts_TS of the rows, ascending within each layer."""
    ends = np.cumsum(spec.top_k_L)[:-1]
    return np.concatenate([np.sort(layer_TK, axis=1) for layer_TK in np.split(rows.experts_TS, ends, axis=1)], axis=1)


def _named(kind: str, digest: Any) -> str:
    return f"{kind}:{digest.hexdigest()[:_LENGTH]}"
