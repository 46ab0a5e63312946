"""Scores predictors on requests that they were not made from, beside the counting predictors.

Three measures of one prediction, the top-k of the scores against the k experts that the router chose: the share that
match, whether all match, and whether at least one does. Each is a mean over tokens and over the layers 1..L-1;
nothing is predicted for layer 0.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetool.errors import UsageError
from moetool.predictor import Predictor, build, load_predictor
from moetool.trace import TokenBatch, Trace, to_events
from moetool.types import Phase

BASELINES = ("popularity", "affinity")
_CHUNK_TOKENS = 1024
_TIMED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well one layer, or all, was predicted in one phase, or both.

    Attributes:
        phase: `prefill`, `decode` or `all`.
        layer: 1..L-1, or None for all of them.
        predictions: pairs of a token and a layer.
        match: mean share |predicted ∩ true| / k.
        exact: share of the predictions with all k right.
        at_least_one: share with one right or more.
    """

    phase: str
    layer: int | None
    predictions: int
    match: float
    exact: float
    at_least_one: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One predictor on the held-out requests of one trace.

    Attributes:
        predictor: its name.
        path: its folder; for a baseline, the folder of the predictor beside which it was counted.
        baseline: for a baseline, what it was counted on; else None.
        requests: `test` (of the trace that it was trained on) or `all`.
        num_requests, num_skipped: requests scored; requests of another trace that repeat a prompt seen in training.
        num_tokens: tokens scored.
        parameters: what gradient descent fitted.
        size_bytes: parameters and buffers in memory.
        expert_bytes_share: `size_bytes` as a share of the model's routed experts.
        step_ms: median time to observe and predict all layers of one token, on the CPU, in milliseconds.
        scores: all layers and phases first, then by phase and layer.
    """

    predictor: str
    path: str
    baseline: str | None
    requests: str
    num_requests: int
    num_skipped: int
    num_tokens: int
    parameters: int
    size_bytes: int
    expert_bytes_share: float
    step_ms: float
    scores: tuple[Score, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def evaluate(paths: Sequence[Path], trace: Path) -> list[Evaluation]:
    """Score predictors and, beside each, the counting predictors made from the same training requests.

    On the trace that a predictor was trained on only its test requests count; on another trace of the model all
    requests whose prompt it has not seen. The baselines are counted again where the trace is the one trained on;
    elsewhere they are taken from the buffers of the predictor, as far as it has them.

    Returns:
        One evaluation a predictor, in the order of `paths`, each followed by those of its baselines that were not
        listed before.

    Raises:
        UsageError: no such trace or predictor; no request of the trace is held out.
        MismatchError: another model's trace, or something is damaged.
    """
    source = Trace(trace)
    predictors = [load_predictor(path) for path in paths]
    for predictor, path in zip(predictors, paths, strict=True):
        source.spec.require_same(predictor.spec, f"the trace {trace}", f"the predictor {path}")
        source.require(predictor.needs, predictor.name)
    listed = {(predictor.name, *_made_from(predictor)) for predictor in predictors}
    evaluations = []
    for predictor, path in zip(predictors, paths, strict=True):
        evaluations.append(_evaluate(predictor, path, source, predictor.card, baseline=None))
        for name in BASELINES:
            key = (name, *_made_from(predictor))
            if key not in listed and (counted := _baseline(name, predictor, source)):
                listed.add(key)
                evaluations.append(_evaluate(counted[0], path, source, predictor.card, baseline=counted[1]))
    return evaluations


def _made_from(predictor: Predictor) -> tuple[str, tuple[int, ...]]:
    """The trace and the requests that a predictor was trained on."""
    return predictor.card["trace"]["sha256"], tuple(predictor.card["requests"]["train"])


def held_out(card: dict[str, Any], trace: Trace) -> tuple[frozenset[int], str, int]:
    """The requests of a trace that a predictor may be scored on, `test` or `all`, and how many were skipped.

    Raises:
        UsageError: there is none.
    """
    if card["trace"]["sha256"] == trace.sha256:
        return frozenset(card["requests"]["test"]), "test", 0
    seen = set(card["seen_prompts"])
    rows = [row for row in trace.requests.to_pylist() if row["tokens"]]
    unseen = frozenset(row["request"] for row in rows if f"{row['dataset']}/{row['prompt_id']}" not in seen)
    if not unseen:
        raise UsageError(
            f"{card['predictor']} was trained on all {len(rows)} prompts of {trace.path}, expected some that it has "
            f"not seen; capture other prompts"
        )
    return unseen, "all", len(rows) - len(unseen)


def _baseline(name: str, predictor: Predictor, trace: Trace) -> tuple[Predictor, str] | None:
    """A counting predictor from what `predictor` was trained on, and a word on where its counts come from."""
    baseline = build(name, predictor.spec)
    if predictor.card["trace"]["sha256"] == trace.sha256:
        requests = predictor.card["requests"]["train"]
        routes = [_routes(trace, rows.experts_TS) for rows in _rows(trace, frozenset(requests))]
        baseline.count(np.concatenate(routes))
        return baseline.eval(), f"the same {len(requests)} training requests"
    state = predictor.state_dict()
    if not baseline.state_dict().keys() <= state.keys():
        return None
    baseline.load_state_dict({key: state[key] for key in baseline.state_dict()})
    return baseline.eval(), f"the buffers of {predictor.name}"


def _evaluate(
    predictor: Predictor, path: Path, trace: Trace, card: dict[str, Any], *, baseline: str | None
) -> Evaluation:
    requests, which, num_skipped = held_out(card, trace)
    tally = _Tally(predictor.num_layers)
    for rows in _rows(trace, requests):
        tally.add(predictor, torch.from_numpy(_routes(trace, rows.experts_TS)), torch.from_numpy(rows.phase_T))
    tensors = [*predictor.parameters(), *predictor.buffers()]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    spec = trace.spec
    routed_bytes = sum(e * size for e, size in zip(spec.num_experts_L, spec.expert_bytes_L, strict=True))
    return Evaluation(
        predictor=predictor.name,
        path=str(path),
        baseline=baseline,
        requests=which,
        num_requests=len(requests),
        num_skipped=num_skipped,
        num_tokens=tally.num_tokens,
        parameters=sum(parameter.numel() for parameter in predictor.parameters()),
        size_bytes=size_bytes,
        expert_bytes_share=size_bytes / routed_bytes,
        step_ms=_step_ms(predictor, trace, requests),
        scores=tally.scores(),
    )


class _Tally:
    """Counts of right predictions by phase and layer.

    Shapes: count_PL4 int64, P phases; the four are predictions, matching experts, all right, one right or more.
    """

    def __init__(self, num_layers: int) -> None:
        self.count_PL4 = np.zeros((len(Phase), num_layers, 4), np.int64)
        self.top_k = 0

    @torch.inference_mode()
    def add(self, predictor: Predictor, experts_TLK: Tensor, phase_T: Tensor) -> None:
        self.top_k = predictor.top_k
        for layer in range(1, predictor.num_layers):
            scores_TE = predictor.layer_scores(experts_TLK[:, :layer], layer)
            predicted_TK = scores_TE.topk(predictor.top_k, dim=1).indices
            right_T = (predicted_TK[:, :, None] == experts_TLK[:, layer, None, :]).sum(dim=(1, 2))
            ones_T = torch.ones_like(right_T)
            measures_T4 = torch.stack([ones_T, right_T, right_T == predictor.top_k, right_T > 0], dim=1)
            for phase in Phase:
                self.count_PL4[phase, layer] += measures_T4[phase_T == phase].sum(dim=0).numpy()

    @property
    def num_tokens(self) -> int:
        return int(self.count_PL4[:, 1, 0].sum())

    def scores(self) -> tuple[Score, ...]:
        counts_L4 = {"all": self.count_PL4.sum(axis=0), **{p.name.lower(): self.count_PL4[p] for p in Phase}}
        overall = [self._score(phase, None, count_L4.sum(axis=0)) for phase, count_L4 in counts_L4.items()]
        layers = range(1, self.count_PL4.shape[1])
        by_layer = [self._score(phase, layer, counts_L4[phase][layer]) for phase in counts_L4 for layer in layers]
        return tuple(score for score in overall + by_layer if score.predictions)

    def _score(self, phase: str, layer: int | None, count_4: np.ndarray) -> Score:
        predictions, right, exact, any_right = map(int, count_4)
        total = max(predictions, 1)
        return Score(
            phase=phase,
            layer=layer,
            predictions=predictions,
            match=right / (total * self.top_k),
            exact=exact / total,
            at_least_one=any_right / total,
        )


def _rows(trace: Trace, requests: frozenset[int]) -> Iterator[TokenBatch]:
    """The tokens of some requests, in pieces small enough for any predictor's input."""
    wanted = np.array(sorted(requests))
    for batch in trace.batches():
        rows = batch.select(np.isin(batch.request_T, wanted))
        for start in range(0, len(rows), _CHUNK_TOKENS):
            yield rows.select(slice(start, start + _CHUNK_TOKENS))


def _routes(trace: Trace, experts_TS: np.ndarray) -> np.ndarray:
    """experts_TLK int64, from the trace's flat columns."""
    return experts_TS.astype(np.int64).reshape(-1, trace.spec.num_layers, trace.spec.top_k_L[0])


def _step_ms(predictor: Predictor, trace: Trace, requests: frozenset[int]) -> float:
    """Median milliseconds of what a decode step asks of a predictor, on tokens of the trace; the first warms up."""
    rows = next(_rows(trace, requests))
    seconds = []
    for step in range(_TIMED_STEPS + 1):
        token = step % len(rows)
        _, events = to_events(trace.spec, rows.select(slice(token, token + 1)), step)
        began = time.perf_counter()
        for event in events[:-1]:
            predictor.observe(event)
            predictor.scores(event.layer + 1)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[1:])
