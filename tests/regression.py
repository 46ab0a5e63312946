"""A linear baseline for predicting a coming batch: ridge regression on the choices of its first MoE layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec
from moetool.placement.demand import Batch, Demand
from moetool.placement.modes import Predict


def regressed(history: Sequence[Batch], penalty: float = 10.0) -> Predict:
    """Predict a coming batch from the choices of its first MoE layer, by ridge regression on the history.

    For each token and later layer, the probability of each expert is linear in the token's first-layer experts and in
    their mean over the request. The first layer is known, as in `calibrated`.

    Args:
        penalty: added to the diagonal of the normal equations.
    """
    spec = history[0][0].spec
    start_L = np.concatenate([[0], np.cumsum(spec.top_k_L)])
    square: Any = 0.0
    product: list[Any] = [0.0] * spec.num_layers
    for _, parts in history:
        for _, rows_TS in parts:
            known_TF = _features(spec, rows_TS)
            square = square + known_TF.T @ known_TF
            for layer in range(1, spec.num_layers):
                chosen_TE = _chosen(rows_TS[:, start_L[layer] : start_L[layer + 1]], spec.num_experts)
                product[layer] = product[layer] + known_TF.T @ chosen_TE
    penalised = square + penalty * np.eye(2 * spec.num_experts + 1)
    weight_LFE = [np.linalg.solve(penalised, product[layer]) for layer in range(1, spec.num_layers)]

    def predict(batch: Batch) -> Demand:
        tokens_GLE = batch[0].tokens_GLE.copy()
        for g, (_, rows_TS) in enumerate(batch[1]):
            known_TF = _features(spec, rows_TS)
            for layer, weight_FE in enumerate(weight_LFE, 1):
                chance_TE = np.clip(known_TF @ weight_FE, 0.0, 1.0)
                chance_TE[:, spec.num_experts_L[layer] :] = 0.0
                tokens_GLE[g, layer] = chance_TE.sum(axis=0)
        return replace(batch[0], tokens_GLE=tokens_GLE)

    return predict


def _features(spec: ModelSpec, rows_TS: np.ndarray) -> np.ndarray:
    """Features of each token: its first-layer experts, their mean over the request, and 1."""
    chosen_TE = _chosen(rows_TS[:, : spec.top_k_L[0]], spec.num_experts)
    mean_TE = np.broadcast_to(chosen_TE.mean(axis=0), chosen_TE.shape)
    return np.concatenate([chosen_TE, mean_TE, np.ones((len(rows_TS), 1))], axis=1)


def _chosen(experts_TK: np.ndarray, num_experts: int) -> np.ndarray:
    chosen_TE = np.zeros((len(experts_TK), num_experts))
    np.put_along_axis(chosen_TE, experts_TK.astype(np.int64), 1.0, axis=1)
    return chosen_TE
