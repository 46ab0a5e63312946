"""Identity of prompts by content, independent of file names and ids."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

_LENGTH = 24  # hexadecimal digits of a digest
_SEQUENCE = "sequence:"
_KINDS = ("tokens:", "experts:", _SEQUENCE)


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """Return the identity of a prompt with these tokens."""
    return _named("tokens", hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()))


def prompt_digests(trace: Trace, requests: Collection[int] | None = None) -> dict[int, frozenset[str]]:
    """Return the identity of each request: the tokens of its prompt, if recorded, and the experts of its prompt.

    The experts (a set per token and layer) identify a prompt if one of the traces withholds its tokens. This fails if a
    tie was resolved differently, for example at another batch size. A request with at most one prompt row is identified
    by all its rows: its prompt was not recorded or not marked, and every text may begin with the same token.

    Args:
        requests: requests to include (default: all).

    Raises:
        MismatchError: the trace is damaged.
    """
    held: dict[int, _Content] = {}
    for rows in trace.batches():
        for request in np.unique(rows.request_T).tolist():
            if requests is None or request in requests:
                held.setdefault(request, _Content()).add(trace.spec, rows.select(rows.request_T == request))
    return {request: content.names() for request, content in held.items()}


class _Content:
    """Digests of a request's prompt and, until it has a second prompt row, of all its rows."""

    def __init__(self) -> None:
        self._prompt_rows = 0
        self._whole = {"prompt": True, "sequence": True}
        self._digests = {
            (part, kind): hashlib.sha256() for part in ("prompt", "sequence") for kind in ("tokens", "experts")
        }

    def add(self, spec: ModelSpec, rows: TokenBatch) -> None:
        prompt = rows.select(rows.iteration_T == 0)
        self._prompt_rows += len(prompt)
        self._update("prompt", spec, prompt)
        if self._prompt_rows < 2:
            self._update("sequence", spec, rows)

    def names(self) -> frozenset[str]:
        part = "prompt" if self._prompt_rows > 1 else "sequence"
        found = {kind: self._digests[part, kind].hexdigest()[:_LENGTH] for kind in ("tokens", "experts")}
        if part == "sequence":
            return frozenset(
                f"{_SEQUENCE}{one}" for kind, one in found.items() if kind != "tokens" or self._whole[part]
            )
        return frozenset(f"{kind}:{one}" for kind, one in found.items() if kind != "tokens" or self._whole[part])

    def _update(self, part: str, spec: ModelSpec, rows: TokenBatch) -> None:
        if len(rows):
            self._whole[part] &= bool((rows.token_id_T >= 0).all())
            self._digests[part, "tokens"].update(rows.token_id_T.astype("<i4").tobytes())
            self._digests[part, "experts"].update(_sorted_experts(spec, rows).astype("<u2").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which requests of a trace repeat prompts that a predictor has seen.

    Attributes:
        repeated: requests whose prompts are among these.
        undecided: number of other requests that may repeat one of them: one side has its prompt, and the other only a
            whole sequence without a marked prompt.
    """

    repeated: frozenset[int]
    undecided: int


def overlap(trace: Trace, seen_prompts: Collection[str]) -> Overlap:
    """Compare the requests of a trace with seen prompts, by `prompt_digests` or as `dataset/prompt_id`.

    Args:
        seen_prompts: digests of the training prompts in a predictor's card; older cards hold names instead.
    """
    seen = set(seen_prompts)
    named = {row["request"] for row in trace.requests.to_pylist() if f"{row['dataset']}/{row['prompt_id']}" in seen}
    contents = {name.partition(":")[2] for name in seen if name.startswith(_KINDS)}
    kinds = {name.startswith(_SEQUENCE) for name in seen if name.startswith(_KINDS)}
    known = prompt_digests(trace)
    same = {request for request, names in known.items() if {name.partition(":")[2] for name in names} & contents}
    repeats = frozenset(named | same)
    return Overlap(
        repeated=repeats,
        undecided=sum(
            request not in repeats and (not next(iter(names)).startswith(_SEQUENCE)) in kinds
            for request, names in known.items()
        ),
    )


def trained_on(trace: Trace, card: Mapping[str, Any]) -> Overlap:
    """Compare the requests of a trace with those of a predictor's training and validation, by its card.

    Reads the trace, unless the predictor was trained on it.
    """
    if card["trace"]["sha256"] == trace.sha256:
        return Overlap(repeated=frozenset([*card["requests"]["train"], *card["requests"]["validation"]]), undecided=0)
    return overlap(trace, card["seen_prompts"])


def _sorted_experts(spec: ModelSpec, rows: TokenBatch) -> np.ndarray:
    """Return experts_TS of the rows, ascending within each layer."""
    ends = np.cumsum(spec.top_k_L)[:-1]
    return np.concatenate([np.sort(layer_TK, axis=1) for layer_TK in np.split(rows.experts_TS, ends, axis=1)], axis=1)


def _named(kind: str, digest: Any) -> str:
    return f"{kind}:{digest.hexdigest()[:_LENGTH]}"
