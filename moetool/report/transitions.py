"""Prediction of a layer's experts from those of the layer before.

Shapes, in addition to the letters of `moetool.base.types`: M pairs of a layer and the next (M = L - 1).
"""

from dataclasses import dataclass

import numpy as np

from moetool.report.sample import SampledRoutes

_SCORED_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """Prediction of a layer's experts from those of the layer before.

    Attributes:
        match_M: share of the next layer's k experts among the k with the highest affinity to those just chosen.
            Affinity is counted on one half of the requests and scored on at most 4,096 tokens of the other.
        popular_M: the same for the k most used experts of that half.
        chance_M: for k random experts: k / E.
        repeat_L: share of a token's experts that the request's previous token used in the same layer; NaN where no
            request has two tokens.
    """

    match_M: np.ndarray
    popular_M: np.ndarray
    chance_M: np.ndarray
    repeat_L: np.ndarray


def affinity(routes: SampledRoutes) -> Affinity:
    """Score each layer's affinity to the next on held-out requests.

    Source: DuoServe-MoE § 4.1, Eqs. 2 and 3; a layer's score is the mean of the rows of the experts chosen.
    """
    spec, half_T = routes.spec, routes.half_T()
    counted_TS, held_TS = routes.experts_TS[half_T == 0], routes.experts_TS[half_T == 1]
    if not len(held_TS):
        held_TS = counted_TS[:0]
    held_TS = held_TS[np.linspace(0, len(held_TS) - 1, min(len(held_TS), _SCORED_TOKENS)).astype(int)]
    match, popular, chance = [], [], []
    for layer in range(spec.num_layers - 1):
        now, then = routes.columns(layer), routes.columns(layer + 1)
        num_experts, top_k = spec.num_experts_L[layer + 1], spec.top_k_L[layer + 1]
        pairs_EE = pair_counts(counted_TS[:, now], counted_TS[:, then], spec.num_experts_L[layer], num_experts)
        popular_E = np.bincount(counted_TS[:, then].ravel(), minlength=num_experts).astype(np.float64)
        rows_EE = np.where(pairs_EE.sum(axis=1, keepdims=True) > 0, pairs_EE, popular_E)
        rows_EE = rows_EE / rows_EE.sum(axis=1, keepdims=True)
        scores_TE = np.zeros((len(held_TS), num_experts))
        for slot in range(now.start, now.stop):
            scores_TE += rows_EE[held_TS[:, slot]]
        match.append(_matched(scores_TE, held_TS[:, then]))
        popular.append(_matched(popular_E[None], held_TS[:, then]))
        chance.append(top_k / num_experts)
    return Affinity(
        match_M=np.array(match), popular_M=np.array(popular), chance_M=np.array(chance), repeat_L=_repeats(routes)
    )


def pair_counts(now_TK: np.ndarray, then_TK: np.ndarray, num_now: int, num_then: int) -> np.ndarray:
    """Return [i, j]: number of tokens that chose expert i in one layer and j in the other."""
    counts = np.zeros(num_now * num_then, np.int64)
    for slot in range(now_TK.shape[1]):
        keys = now_TK[:, slot, None].astype(np.int64) * num_then + then_TK
        counts += np.bincount(keys.ravel(), minlength=len(counts))
    return counts.reshape(num_now, num_then).astype(np.float64)


def lift(routes: SampledRoutes, layer: int) -> np.ndarray:
    """Return [i, j]: how many times likelier expert j of the next layer is after expert i than in general.

    NaN for an expert chosen by fewer than 20 tokens, where chance dominates, and for one never chosen.
    """
    spec, now, then = routes.spec, routes.columns(layer), routes.columns(layer + 1)
    rows_TS = routes.experts_TS
    pairs_EE = pair_counts(rows_TS[:, now], rows_TS[:, then], spec.num_experts_L[layer], spec.num_experts_L[layer + 1])
    total_E = pairs_EE.sum(axis=1)
    general_E = pairs_EE.sum(axis=0) / pairs_EE.sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        lift_EE: np.ndarray = pairs_EE / total_E[:, None] / general_E
    lift_EE[total_E < 20 * spec.top_k_L[layer + 1]] = np.nan
    return lift_EE


def _matched(scores_TE: np.ndarray, true_TK: np.ndarray) -> float:
    """Return the mean share of the true experts among as many with the highest scores; ties go to the lower number.

    One row of scores stands for all tokens.
    """
    if not len(true_TK):
        return float("nan")
    top_k = true_TK.shape[1]
    best_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
    return float((best_TK[:, :, None] == true_TK[:, None, :]).any(axis=1).mean())


def _repeats(routes: SampledRoutes) -> np.ndarray:
    spec = routes.spec
    follows_T = np.ones(len(routes.experts_TS), bool)
    follows_T[routes.start_B[:-1]] = False
    places = np.flatnonzero(follows_T)
    if not len(places):
        return np.full(spec.num_layers, np.nan)
    shares = []
    for layer in range(spec.num_layers):
        chosen_TK = routes.experts_TS[:, routes.columns(layer)]
        found = np.zeros(len(places))
        for slot in range(chosen_TK.shape[1]):
            found += (chosen_TK[places, slot, None] == chosen_TK[places - 1]).any(axis=1)
        shares.append(found.mean() / chosen_TK.shape[1])
    return np.array(shares)
