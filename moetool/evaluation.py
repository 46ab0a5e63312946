"""Scores predictors on requests that they were not made from, beside the counting predictors.

A prediction at distance d is made of MoE layer l when the layers up to l - d have run, for one token; nothing is
predicted for the first layers, of which nothing is known that early. The top-k of its scores is compared with the k
experts that the router chose. Each measure is a mean over tokens and layers.
"""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetool.errors import UsageError
from moetool.predictor import Predictor, build, load_predictor
from moetool.tokens import Tokens, read, stream
from moetool.trace import Trace, to_events
from moetool.types import Phase

BASELINES = ("popularity", "affinity")
DISTANCES = (1, 2, 3, 4, 6, 8)
_TIMED_STEPS = 20
_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well one layer, or all, was predicted from one distance in one phase, or both.

    Attributes:
        phase: `prefill`, `decode` or `all`.
        distance: how many layers ahead.
        layer: distance..L-1, or None for all of them.
        predictions: pairs of a token and a layer.
        match: mean share |predicted ∩ true| / k.
        exact: share of the predictions with all k right.
        at_least_one: share with one right or more.
        recall: for m = k+1..2k (as far as there are experts) the mean share of the k that the top-m hold.
        calibration_error: mean difference between an expert's probability, as the predictor gives it, and how often
            such experts were chosen, over ten bins of the probability.
    """

    phase: str
    distance: int
    layer: int | None
    predictions: int
    match: float
    exact: float
    at_least_one: float
    recall: tuple[float, ...]
    calibration_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One predictor on the held-out requests of one trace.

    Attributes:
        predictor: its name.
        path: its folder; for a baseline, the folder of the predictor beside which it was counted.
        baseline: for a baseline, what it was counted on; else None.
        trace: the folder of the trace.
        unseen_task: whether the trace was given as one of a task that the predictors were not trained on.
        requests: `test` (of the trace that it was trained on) or `all`.
        num_requests, num_skipped: requests scored; requests of another trace that repeat a prompt seen in training.
        num_tokens: tokens scored.
        parameters: what gradient descent fitted.
        size_bytes: parameters and buffers in memory.
        expert_bytes_share: `size_bytes` as a share of the model's routed experts.
        step_ms: median time to observe and predict all layers of one token, on the CPU, in milliseconds.
        training_s, training_tokens: what its training took, and the tokens that it had; None for a baseline.
        scores: the next layer, all layers and phases first, then by phase and layer; then the same for each farther
            distance of `DISTANCES` that the predictor sees.
    """

    predictor: str
    path: str
    baseline: str | None
    trace: str
    unseen_task: bool
    requests: str
    num_requests: int
    num_skipped: int
    num_tokens: int
    parameters: int
    size_bytes: int
    expert_bytes_share: float
    step_ms: float
    training_s: float | None
    training_tokens: int | None
    scores: tuple[Score, ...]

    def overall(self, phase: str = "all") -> dict[int, Score]:
        """By distance, the score over all layers of a phase."""
        return {s.distance: s for s in self.scores if s.phase == phase and s.layer is None}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def evaluate(paths: Sequence[Path], trace: Path, unseen_task: Path | None = None) -> list[Evaluation]:
    """Score predictors and, beside each, the counting predictors made from the same training requests.

    On the trace that a predictor was trained on only its test requests count; on another trace of the model all
    requests whose prompt it has not seen. The baselines are counted again where the trace is the one trained on;
    elsewhere they are taken from the buffers of the predictor, as far as it has them.

    Args:
        unseen_task: a trace of a task that none of them was trained on; scored as well.

    Returns:
        One evaluation a predictor, in the order of `paths`, each followed by those of its baselines that were not
        listed before; then the same on `unseen_task`.

    Raises:
        UsageError: no such trace or predictor; no request of the trace is held out.
        MismatchError: another model's trace, one without what a predictor looks at, or something is damaged.
    """
    predictors = [load_predictor(path) for path in paths]
    sources = [Trace(folder) for folder in (trace, unseen_task) if folder is not None]
    for source in sources:
        for predictor, path in zip(predictors, paths, strict=True):
            source.spec.require_same(predictor.spec, f"the trace {source.path}", f"the predictor {path}")
            source.require(predictor.needs, predictor.name)
    if unseen_task is not None:
        for predictor in predictors:
            _require_unseen(predictor, sources[1])
    evaluations: list[Evaluation] = []
    kept: dict[tuple[Any, ...], tuple[Predictor, str]] = {}
    for number, source in enumerate(sources):
        listed = {(predictor.name, *_made_from(predictor)) for predictor in predictors}
        for predictor, path in zip(predictors, paths, strict=True):
            evaluations.append(_evaluate(predictor, path, source, predictor.card, unseen_task=number == 1))
            for name in BASELINES:
                key = (name, *_made_from(predictor))
                counted = kept.get(key) or _baseline(name, predictor, source)
                if key not in listed and counted:
                    listed.add(key)
                    kept[key] = counted
                    evaluations.append(
                        _evaluate(
                            counted[0], path, source, predictor.card, baseline=counted[1], unseen_task=number == 1
                        )
                    )
    return evaluations


def _made_from(predictor: Predictor) -> tuple[str, tuple[int, ...]]:
    """The trace and the requests that a predictor was trained on."""
    return predictor.card["trace"]["sha256"], tuple(predictor.card["requests"]["train"])


def _require_unseen(predictor: Predictor, trace: Trace) -> None:
    if predictor.card["trace"]["sha256"] == trace.sha256:
        raise UsageError(
            f"{trace.path} is the trace that {predictor.name} was trained on, expected one of an unseen task; "
            f"give it as --trace"
        )


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
        baseline.count(read(trace, baseline.needs, requests, Path()))
        return baseline.eval(), f"the same {len(requests)} training requests"
    state = predictor.state_dict()
    if not baseline.state_dict().keys() <= state.keys():
        return None
    baseline.load_state_dict({key: state[key] for key in baseline.state_dict()})
    return baseline.eval(), f"the buffers of {predictor.name}"


def _evaluate(
    predictor: Predictor,
    path: Path,
    trace: Trace,
    card: dict[str, Any],
    *,
    unseen_task: bool = False,
    baseline: str | None = None,
) -> Evaluation:
    requests, which, num_skipped = held_out(card, trace)
    distances = [d for d in DISTANCES if d < predictor.num_layers and d <= predictor.reach(trace.ahead)]
    tally = Tally(predictor, distances)
    if predictor.remembers or predictor.incremental:
        _replay(copy.deepcopy(predictor), trace, requests, tally)  # what it remembers of one trace stays there
    else:
        for tokens in stream(trace, predictor.needs, requests):
            tally.add(tokens)
    return Evaluation(
        predictor=predictor.name,
        path=str(path),
        baseline=baseline,
        trace=str(trace.path),
        unseen_task=unseen_task,
        requests=which,
        num_requests=len(requests),
        num_skipped=num_skipped,
        num_tokens=tally.num_tokens,
        parameters=sum(parameter.numel() for parameter in predictor.parameters()),
        size_bytes=predictor.num_bytes,
        expert_bytes_share=predictor.num_bytes / trace.spec.all_experts_bytes,
        step_ms=_step_ms(predictor, trace, requests),
        training_s=None if baseline else card["seconds"],
        training_tokens=None if baseline else card["tokens"]["train"],
        scores=tally.scores(),
    )


def _replay(predictor: Predictor, trace: Trace, requests: frozenset[int], tally: "Tally") -> None:
    """Score a predictor by what it says as it watches: request after request, forward after forward."""
    columns = predictor.needs - {"experts"}
    for info, events in trace.forwards(sequential=True, columns=columns, requests=requests):
        phase_T = torch.tensor(info.phase_T)
        true_LTK = [torch.tensor(event.experts_TK) for event in events]
        for event in events:
            predictor.observe(event)
            for distance in tally.distances:
                if (layer := event.layer + distance) < predictor.num_layers:
                    tally.count(distance, layer, torch.from_numpy(predictor.scores(layer)), true_LTK[layer], phase_T)


class Tally:
    """Counts of right predictions by distance, phase and layer.

    Args:
        distances: those to score.

    Shapes: of each distance hits_PLM int64, P phases: predictions, all right, one right or more, then the true experts
        among the top-m for m = k..2k; and bins_PL3B float64, B bins of the probability: experts, the sum of their
        probabilities, and how many of them were chosen.
    """

    def __init__(self, predictor: Predictor, distances: Sequence[int]) -> None:
        self.predictor = predictor
        self.distances = tuple(distances)
        self.top_k, num_layers = predictor.top_k, predictor.num_layers
        self.widest = min(2 * self.top_k, predictor.num_experts)
        hits = (len(Phase), num_layers, 3 + self.widest - self.top_k + 1)
        self._hits_PLM = {d: np.zeros(hits, np.int64) for d in self.distances}
        self._bins_PL3B = {d: np.zeros((len(Phase), num_layers, 3, _BINS)) for d in self.distances}

    @torch.inference_mode()
    def add(self, tokens: Tokens) -> None:
        """Score a predictor that does not remember on tokens of a trace."""
        assert tokens.phase_T is not None
        for distance in self.distances:
            for layer in range(distance, tokens.num_layers):
                scores_TE = self.predictor.layer_scores(tokens.before(layer - distance + 1), layer)
                self.count(distance, layer, scores_TE, tokens.experts_TPK[:, layer], tokens.phase_T)

    @torch.inference_mode()
    def count(self, distance: int, layer: int, scores_TE: Tensor, true_TK: Tensor, phase_T: Tensor) -> None:
        """Take in one layer's predictions and the truth."""
        k = self.top_k
        chosen_TE = torch.zeros_like(scores_TE).scatter_(1, true_TK, 1.0)
        best_TM = scores_TE.topk(self.widest, dim=1).indices
        found_TM = chosen_TE.gather(1, best_TM).cumsum(dim=1)[:, k - 1 :].long()
        right_T = found_TM[:, :1]
        hits_TM = torch.cat([torch.ones_like(right_T), right_T == k, right_T > 0, found_TM], dim=1)
        chance_TE = self.predictor.probabilities(scores_TE).double()
        bin_TE = (chance_TE * _BINS).long().clamp(max=_BINS - 1)
        for phase in Phase:
            mine = phase_T == phase
            self._hits_PLM[distance][phase, layer] += hits_TM[mine].sum(dim=0).numpy()
            where = bin_TE[mine].flatten().numpy()
            for row, weight in enumerate((None, chance_TE[mine].flatten().numpy(), chosen_TE[mine].flatten().numpy())):
                self._bins_PL3B[distance][phase, layer, row] += np.bincount(where, weight, minlength=_BINS)

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        first = min(self.distances)
        return int(self._hits_PLM[first][:, -1, 0].sum())

    def scores(self) -> tuple[Score, ...]:
        """All that was counted, in the order that `Evaluation.scores` promises."""
        made: list[Score] = []
        for distance in self.distances:
            hits, bins = self._hits_PLM[distance], self._bins_PL3B[distance]
            phases = {"all": (hits.sum(axis=0), bins.sum(axis=0))}
            phases |= {p.name.lower(): (hits[p], bins[p]) for p in Phase}
            made += [self._score(p, distance, None, h.sum(axis=0), b.sum(axis=0)) for p, (h, b) in phases.items()]
            for phase, (h, b) in phases.items():
                made += [self._score(phase, distance, i, h[i], b[i]) for i in range(distance, len(h))]
        return tuple(score for score in made if score.predictions)

    def _score(self, phase: str, distance: int, layer: int | None, hits_M: np.ndarray, bins_3B: np.ndarray) -> Score:
        predictions, exact, any_right, right, *wider = map(int, hits_M)
        total = max(predictions, 1)
        experts_B, chance_B, chosen_B = bins_3B
        return Score(
            phase=phase,
            distance=distance,
            layer=layer,
            predictions=predictions,
            match=right / (total * self.top_k),
            exact=exact / total,
            at_least_one=any_right / total,
            recall=tuple(found / (total * self.top_k) for found in wider),
            calibration_error=float(np.abs(chance_B - chosen_B).sum() / max(experts_B.sum(), 1)),
        )


def _step_ms(predictor: Predictor, trace: Trace, requests: frozenset[int]) -> float:
    """Median milliseconds of what a decode step asks of a predictor, on tokens of the trace; the first warms up."""
    predictor = copy.deepcopy(predictor)
    wanted = np.array(sorted(requests))
    pieces = (
        (rows, embedding_TD, mine)
        for rows, embedding_TD in trace.token_rows(predictor.needs - {"experts"})
        if len(mine := np.flatnonzero(np.isin(rows.request_T, wanted)))
    )
    rows, embedding_TD, mine = next(pieces)
    seconds = []
    for step in range(_TIMED_STEPS + 1):
        token = mine[[step % len(mine)]]
        one_1D = None if embedding_TD is None else embedding_TD[token]
        _, events = to_events(trace.spec, rows.select(token), step, embedding_TD=one_1D)
        began = time.perf_counter()
        for event in events[:-1]:
            predictor.observe(event)
            predictor.scores(event.layer + 1)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[1:])
