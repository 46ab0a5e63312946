"""Prediction of a coming batch by recall: tokens follow earlier tokens that are similar in the first MoE layer."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moetool.base.types import ModelSpec
from moetool.placement.demand import Batch, Demand

_BESIDE = {1: 0.5, -1: 0.25, 2: 0.25}
"""Weights of the token before, the one after, and the one before the previous, relative to the token itself."""
_REQUEST = 1.0
"""Weight of the request's mean."""


class Recall:
    """Predicts a coming batch from its first MoE layer's experts, by the most similar served tokens.

    The similarity of two tokens compares the first layer's experts of the tokens, of the adjacent tokens (`_BESIDE`),
    and of their requests on average. The `neighbours` most similar tokens vote on every later layer, with weights
    exp(sharpness * similarity). The first layer counts as known, as in `moetool.placement.modes.calibrated`. Unlike a
    linear rule, recall keeps which experts occur together.

    Args:
        history: initially known batches.
        neighbours: number of neighbours per token (at most the history).

    Source: the search for similar paths of `moetool.prediction.route_memory`, with only the first layer known.
    """

    def __init__(self, history: Sequence[Batch], neighbours: int = 48, sharpness: float = 16.0) -> None:
        self._spec = history[0][0].spec
        self._neighbours, self._sharpness = neighbours, sharpness
        served = np.concatenate([rows_TS for _, parts in history for _, rows_TS in parts])
        self._mean_E = _chosen(self._spec, served).mean(axis=0)
        self._known: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []
        for batch in history:
            self.learn(batch)

    def learn(self, batch: Batch) -> None:
        """Add a served batch to the memory."""
        spec = self._spec
        # One number for both the layer and the expert.
        first_S = np.repeat(np.arange(spec.num_layers), spec.top_k_L) * spec.num_experts
        for _, rows_TS in batch[1]:
            self._known.append(self._features(rows_TS))
            self._keys.append(rows_TS.astype(np.int64) + first_S)

    def __call__(self, batch: Batch) -> Demand:
        self._known, self._keys = [np.concatenate(self._known)], [np.concatenate(self._keys)]
        tokens_GLE = np.stack([self._expected(rows_TS) for _, rows_TS in batch[1]])
        tokens_GLE[:, 0] = batch[0].tokens_GLE[:, 0]
        return replace(batch[0], tokens_GLE=tokens_GLE)

    def _expected(self, rows_TS: np.ndarray) -> np.ndarray:
        spec, known_CF, keys_CS = self._spec, self._known[0], self._keys[0]
        count = min(self._neighbours, len(known_CF))
        likeness_TC = self._features(rows_TS) @ known_CF.T
        best_TN = np.argpartition(-likeness_TC, count - 1, axis=1)[:, :count]
        likeness_TN = np.take_along_axis(likeness_TC, best_TN, axis=1)
        weight_TN = np.exp(self._sharpness * (likeness_TN - likeness_TN.max(axis=1, keepdims=True)))
        weight_TN /= weight_TN.sum(axis=1, keepdims=True)
        votes_X = np.repeat(weight_TN.ravel(), keys_CS.shape[1])
        size = spec.num_layers * spec.num_experts
        counted_X = np.bincount(keys_CS[best_TN].ravel(), votes_X, minlength=size)
        return np.asarray(counted_X.reshape(spec.num_layers, spec.num_experts))

    def _features(self, rows_TS: np.ndarray) -> np.ndarray:
        """Return features of a request's tokens, whose inner product is the similarity. Shapes: float32 [T, 5 E]."""
        own_TE, top_k = _chosen(self._spec, rows_TS), self._spec.top_k_L[0]
        apart_E = own_TE.mean(axis=0) - self._mean_E
        apart_E = apart_E / max(float(np.linalg.norm(apart_E)), 1e-6)
        parts = [(1.0 / top_k, own_TE), (_REQUEST, np.broadcast_to(apart_E, own_TE.shape))]
        for distance, weight in _BESIDE.items():
            beside_TE = np.zeros_like(own_TE)
            if distance > 0:
                beside_TE[distance:] = own_TE[:-distance]
            else:
                beside_TE[:distance] = own_TE[-distance:]
            parts.append((weight / top_k, beside_TE))
        return np.concatenate([np.float32(weight**0.5) * part_TE for weight, part_TE in parts], axis=1)


def _chosen(spec: ModelSpec, rows_TS: np.ndarray) -> np.ndarray:
    """Return the experts of the first MoE layer as 0 and 1."""
    chosen_TE = np.zeros((len(rows_TS), spec.num_experts), np.float32)
    np.put_along_axis(chosen_TE, rows_TS[:, : spec.top_k_L[0]].astype(np.int64), 1.0, axis=1)
    return chosen_TE
