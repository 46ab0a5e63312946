"""Tokens as the input of predictors: chosen experts of some layers, and requested columns."""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.prediction.unseen_requests import Part
from moetool.trace.events import router_scores
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

FIELDS = {
    "weights": "weights_TPK",
    "logits": "scores_TPE",
    "hidden": "hidden_TPD",
    "ahead": "ahead_TPAE",
    "resident": "resident_TPE",
    "embeddings": "embedding_TD",
    "token_id": "token_id_T",
}
"""Field for each name in a predictor's `needs`; `experts` is always present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """T tokens in their first P MoE layers; fields other than the experts are None if not requested.

    Attributes:
        scores_TPE: the routers' scores over all experts.
        hidden_TPD: hidden states at the routers' inputs.
        ahead_TPAE: the scores of the routers of the next A layers on these hidden states: [:, p, a] is for layer
            p + 1 + a; 0 beyond the last layer.
        resident_TPE: scores of the next layer's router if only resident and shared experts were computed; 0 at the last
            layer.
        embedding_TD: mean output of the embedding layer over the tokens of the request in this iteration.
        request_T: request of each token, if whole requests are given: its tokens are in the order of its forwards.
        iteration_T, phase_T: 0 for prompt tokens, then one number per new token; and their `Phase`. Known if
            `request_T` is.
        example_T: number of each token, if given by `Predictor.prepare`.

    Shapes: int64 and float32 from `take`. Training data is stored smaller (experts int16, other fields float16), with
    wide fields possibly in a file.
    """

    experts_TPK: Tensor
    weights_TPK: Tensor | None = None
    scores_TPE: Tensor | None = None
    hidden_TPD: Tensor | None = None
    ahead_TPAE: Tensor | None = None
    resident_TPE: Tensor | None = None
    embedding_TD: Tensor | None = None
    token_id_T: Tensor | None = None
    request_T: Tensor | None = None
    iteration_T: Tensor | None = None
    phase_T: Tensor | None = None
    example_T: Tensor | None = None

    def __len__(self) -> int:
        return len(self.experts_TPK)

    @property
    def num_layers(self) -> int:
        """Return P, the number of known layers."""
        return self.experts_TPK.shape[1]

    def take(self, index: Any) -> "Tokens":
        """Return the tokens selected by a slice, a mask or an index tensor, as int64 and float32."""
        picked: dict[str, Any] = {}
        for f in fields(self):
            if (column := getattr(self, f.name)) is not None:
                rows = column[index]
                picked[f.name] = rows.float() if rows.is_floating_point() else rows.long()
        return Tokens(**picked)

    def before(self, layer: int) -> "Tokens":
        """Return the tokens as known when only the layers before `layer` have run."""
        cut: dict[str, Any] = {}
        for f in fields(self):
            if "P" in f.name.rpartition("_")[2] and (column := getattr(self, f.name)) is not None:
                cut[f.name] = column[:, :layer]
        return replace(self, **cut)

    def to(self, device: Any) -> "Tokens":
        moved: dict[str, Any] = {
            f.name: None if (v := getattr(self, f.name)) is None else v.to(device) for f in fields(self)
        }
        return Tokens(**moved)


def from_rows(spec: ModelSpec, rows: TokenBatch, embedding_TD: np.ndarray | None = None) -> Tokens:
    """Return rows of a trace as tokens of all layers, of equal width, with the numbers of their gate events."""
    T, L, E = len(rows), spec.num_layers, spec.num_experts

    def scores(logits: np.ndarray) -> np.ndarray:
        return router_scores(logits.reshape(-1, E).astype(np.float32), spec.score_function)

    def tensor(column: np.ndarray | None, *shape: int) -> Tensor | None:
        return None if column is None else torch.from_numpy(column.astype(np.float32)).view(T, L, *shape)

    ahead_TLAE = None
    if rows.ahead_TR is not None:
        A = rows.ahead_TR.shape[1] // (L * E)
        ahead_TLAE = torch.from_numpy(scores(rows.ahead_TR)).view(T, L, A, E)
        for layer in range(L):
            ahead_TLAE[:, layer, max(0, L - 1 - layer) :] = 0
    resident_TLE = None
    if rows.resident_TW is not None:
        resident_TLE = torch.from_numpy(scores(rows.resident_TW)).view(T, L, E)
        resident_TLE[:, L - 1] = 0
    return Tokens(
        experts_TPK=torch.from_numpy(rows.experts_TS.astype(np.int64)).view(T, L, -1),
        weights_TPK=tensor(rows.weights_TS, spec.top_k_L[0]),
        scores_TPE=None if rows.logits_TF is None else torch.from_numpy(scores(rows.logits_TF)).view(T, L, E),
        hidden_TPD=tensor(rows.hidden_TH, spec.hidden_size),
        ahead_TPAE=ahead_TLAE,
        resident_TPE=resident_TLE,
        embedding_TD=None if embedding_TD is None else torch.from_numpy(embedding_TD),
        token_id_T=torch.from_numpy(rows.token_id_T.astype(np.int64)),
        request_T=torch.from_numpy(rows.request_T.astype(np.int64)),
        iteration_T=torch.from_numpy(rows.iteration_T.astype(np.int64)),
        phase_T=torch.from_numpy(rows.phase_T.astype(np.int64)),
    )


class Picker:
    """Selects the tokens of a part of a trace, streamed in the order of each request's forwards."""

    def __init__(self, part: Part) -> None:
        self._wanted = np.array(sorted(part))
        self._spans = dict(part) if isinstance(part, Mapping) else None
        self._passed: dict[int, int] = {}

    def mask(self, request_T: np.ndarray) -> np.ndarray:
        """Return mask_T bool of the next tokens."""
        mine_T: np.ndarray = np.isin(request_T, self._wanted)
        for request, span in (self._spans or {}).items():
            of_T = np.flatnonzero(request_T == request)
            number_T = self._passed.get(request, 0) + np.arange(len(of_T))
            mine_T[of_T] = (number_T >= span.start) & (number_T < span.stop)
            self._passed[request] = self._passed.get(request, 0) + len(of_T)
        return mine_T


def stream(trace: Trace, needs: Collection[str], part: Part, most: int = 1024) -> Iterator[Tokens]:
    """Yield the tokens of a part with the columns of `needs`, at most `most` at a time, in the order of forwards.

    Raises:
        MismatchError: a column is missing, damaged or not finite, or token ids are withheld.
    """
    picker = Picker(part)
    for rows, embedding_TD in trace.token_rows(set(needs) - {"experts"}):
        mine = picker.mask(rows.request_T)
        rows = rows.select(mine)
        embedding_TD = None if embedding_TD is None else embedding_TD[mine]
        for start in range(0, len(rows), most):
            piece = slice(start, start + most)
            tokens = from_rows(trace.spec, rows.select(piece), None if embedding_TD is None else embedding_TD[piece])
            yield _with_ids(tokens, trace) if "token_id" in needs else replace(tokens, token_id_T=None)


def num_tokens(trace: Trace, part: Part) -> int:
    if isinstance(part, Mapping):
        return sum(map(len, part.values()))
    table = trace.requests
    tokens = dict(zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True))
    return sum(tokens[request] for request in set(part))


def read(trace: Trace, needs: Collection[str], part: Part, scratch: Path) -> Tokens:
    """Read all tokens of a part, in the order of forwards.

    Effects: wide fields lie in unnamed files in `scratch`, which vanish with the tokens.

    Raises:
        MismatchError: a column is missing, damaged or not finite, or token ids are withheld.
    """
    count = num_tokens(trace, part)
    held: dict[str, Tensor] = {}
    done = 0
    for piece in stream(trace, needs, part):
        for f in fields(piece):
            if (column := getattr(piece, f.name)) is None:
                continue
            if f.name not in held:
                held[f.name] = _space(count, column, scratch)
            held[f.name][done : done + len(piece)] = column
        done += len(piece)
    if done != count:
        raise MismatchError(f"{trace.path} holds {done:,} of the {count:,} tokens of its requests; capture again")
    if not held:
        return Tokens(experts_TPK=torch.empty((0, trace.spec.num_layers, trace.spec.top_k_L[0]), dtype=torch.int16))
    return Tokens(**held)


IN_MEMORY = 1 << 12  # bytes per token above which a field is stored in a file


def _space(count: int, like: Tensor, scratch: Path) -> Tensor:
    """Allocate a field of `count` tokens, in a file if it is wide."""
    shape = (count, *like.shape[1:])
    if like.is_floating_point():
        if 2 * like[0].numel() > IN_MEMORY and count:
            with tempfile.TemporaryFile(dir=scratch) as file:
                return torch.from_numpy(np.memmap(file, np.float16, "w+", shape=shape))  # the map keeps it open
        return torch.empty(shape, dtype=torch.float16)
    return torch.empty(shape, dtype=torch.int16 if like.ndim == 3 else torch.int64)


def _with_ids(tokens: Tokens, trace: Trace) -> Tokens:
    assert tokens.token_id_T is not None
    if bool((tokens.token_id_T < 0).any()):
        raise MismatchError(
            f"{trace.path} withholds its token ids, which this predictor needs; use a trace from moetool capture"
        )
    return tokens
