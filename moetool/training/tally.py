"""Counts of correct predictions by distance, phase and layer.

A prediction at distance d for MoE layer l is made for one token after layer l - d; the first d layers have none. The
top-k of its scores is compared with the k experts that the router chose. Each measure is a mean over tokens and layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moetool.base.errors import MoetoolError
from moetool.base.types import Phase
from moetool.training.predictor import Predictor
from moetool.training.tokens import Tokens

_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchScore:
    """Scores of one layer or all, at one distance, in one phase or both.

    Attributes:
        phase: `prefill`, `decode` or `all`.
        distance: layers ahead; 0 for predictions of all layers before the first runs.
        layer: distance..L-1, or None for all.
        predictions: number of (token, layer) pairs.
        match: mean share |predicted ∩ true| / k.
        exact: share of the predictions with all k right.
        at_least_one: share with one right or more.
        recall: for m = k+1..2k (at most E) the mean share of the true k in the top-m.
        calibration_error: mean difference between predicted probability and observed frequency of experts, over ten
            bins of the probability.
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


class MatchTally:
    """Counts of right predictions by distance, phase and layer.

    Args:
        distances: distances to score.

    Shapes: for each distance hits_PLM int64, P phases: predictions, all right, at least one right, then the true
    experts in the top-m for m = k..2k; and bins_PL3B float64, B bins of the probability: number of experts, sum of
    their probabilities, number of chosen ones.
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
        """Score a stateless predictor on tokens of a trace."""
        assert tokens.phase_T is not None
        for distance in self.distances:
            for layer in range(distance, tokens.num_layers):
                scores_TE = self.predictor.layer_scores(tokens.before(layer - distance + 1), layer)
                self.count(distance, layer, scores_TE, tokens.experts_TPK[:, layer], tokens.phase_T)

    @torch.inference_mode()
    def count(self, distance: int, layer: int, scores_TE: Tensor, true_TK: Tensor, phase_T: Tensor) -> None:
        """Count one layer's predictions against the truth. Raises: MoetoolError: a score is not finite."""
        if not bool(scores_TE.isfinite().all()):
            raise MoetoolError(
                f"{self.predictor.name} gives scores of MoE layer {layer} that are not finite, {distance} layers "
                f"ahead; train it again, with a lower learning rate"
            )
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
        """Return the number of scored tokens."""
        nearest = min(self.distances)
        return int(self._hits_PLM[nearest][:, -1, 0].sum())

    def scores(self) -> tuple[MatchScore, ...]:
        """Return all scores, in the order of `Evaluation.scores`."""
        made: list[MatchScore] = []
        for distance in self.distances:
            hits, bins = self._hits_PLM[distance], self._bins_PL3B[distance]
            phases = {"all": (hits.sum(axis=0), bins.sum(axis=0))}
            phases |= {p.name.lower(): (hits[p], bins[p]) for p in Phase}
            made += [self._score(p, distance, None, h.sum(axis=0), b.sum(axis=0)) for p, (h, b) in phases.items()]
            for phase, (h, b) in phases.items():
                made += [self._score(phase, distance, i, h[i], b[i]) for i in range(distance, len(h))]
        return tuple(score for score in made if score.predictions)

    def _score(
        self, phase: str, distance: int, layer: int | None, hits_M: np.ndarray, bins_3B: np.ndarray
    ) -> MatchScore:
        predictions, exact, any_right, right, *wider = map(int, hits_M)
        total = max(predictions, 1)
        experts_B, chance_B, chosen_B = bins_3B
        return MatchScore(
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
