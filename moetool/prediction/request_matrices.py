"""Activation matrices: expert use of each request, and the earlier request most similar to a running one.

Shared by MoE-Infinity's policy and predictor.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from moetool.base.types import GateEvent


class RunningRequest:
    """A running request.

    Shapes: counts_LE, number of its tokens that used each expert; similarity_HL, cosine with each earlier request by
    layer.
    """

    __slots__ = ("counts_LE", "similarity_HL")

    def __init__(self, past_HLE: np.ndarray) -> None:
        self.counts_LE = np.zeros(past_HLE.shape[1:], np.float32)
        self.similarity_HL = np.zeros(past_HLE.shape[:2], np.float32)


class ActivationMatrices:
    """Matrices of earlier and running requests.

    Args:
        past_HLE: array for H earlier requests, with rows of unit length in each layer (`unit_rows`).
        num_past: number of filled rows.
    """

    def __init__(self, past_HLE: np.ndarray, num_past: int = 0) -> None:
        self.past_HLE = past_HLE
        self.num_past = num_past
        self.running: dict[int, RunningRequest] = {}
        self._matches = [1] * num_past + [0] * (len(past_HLE) - num_past)

    def begin(self, request: int) -> None:
        """Begin a request without counts."""
        self.running[request] = RunningRequest(self.past_HLE)

    def observe(self, event: GateEvent) -> None:
        """Count the experts of an event's tokens for their requests."""
        for request, experts in zip(event.forward.request_T, event.experts_TK, strict=True):
            counts_E = self.running[request].counts_LE[event.layer]
            for expert in experts:
                counts_E[expert] += 1
        for request in set(event.forward.request_T):
            running = self.running[request]
            unit_E = unit_rows(running.counts_LE[event.layer])
            running.similarity_HL[:, event.layer] = np.einsum("he,e->h", self.past_HLE[:, event.layer], unit_E)

    def match(self, request: int) -> int:
        """Return the earlier request with the most similar matrix: cosine of each layer's counts, averaged over layers.

        Ties go to the lowest row. At least one earlier request must be kept.
        """
        return int(self.running[request].similarity_HL[: self.num_past].sum(axis=1).argmax())

    def used(self, match: int, layers: slice) -> np.ndarray:
        """Return used_LE: shares of an earlier request's choices by expert of these layers; rows sum to 1 or 0."""
        used_LE = self.past_HLE[match, layers]
        return used_LE / np.maximum(used_LE.sum(axis=1, keepdims=True), 1e-9)

    def chances(self, request_T: Sequence[int], layers: slice) -> np.ndarray:
        """Return chance_LE float64: expert shares of the requests' matches, weighted by tokens, not normalized.

        Effects: counts each match, for `remember`.
        """
        total_LE = np.zeros((layers.stop - layers.start, self.past_HLE.shape[2]))
        for request in dict.fromkeys(request_T):
            match = self.match(request)
            self._matches[match] += 1
            total_LE += request_T.count(request) * self.used(match, layers)
        return total_LE

    def remember(self, request: int) -> None:
        """End a request and keep its matrix; a full history drops the one that matched least often."""
        counts_LE = self.running.pop(request).counts_LE
        row = self.num_past
        if row < len(self._matches):
            self.num_past += 1
        else:
            row = self._matches.index(min(self._matches))
        self.past_HLE[row] = unit_rows(counts_LE)
        self._matches[row] = 1
        for running in self.running.values():
            running.similarity_HL[row] = np.einsum("le,le->l", self.past_HLE[row], unit_rows(running.counts_LE))

    def state(self) -> dict[str, np.ndarray]:
        """Return state for `restore`: the earlier requests' matrices and their numbers of matches."""
        count = self.num_past
        return {"past_HLE": self.past_HLE[:count].copy(), "matches_H": np.array(self._matches[:count], np.int64)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore earlier requests; if not all fit, those that matched most often.

        Raises:
            ValueError: the arrays do not come from `state`.
        """
        past_HLE, matches_H = state["past_HLE"], state["matches_H"]
        if past_HLE.shape[1:] != self.past_HLE.shape[1:] or len(past_HLE) != len(matches_H):
            raise ValueError(f"past_HLE has shape {past_HLE.shape}")
        kept = np.sort(np.argsort(-matches_H, kind="stable")[: len(self.past_HLE)])
        self.num_past = len(kept)
        self.past_HLE[: len(kept)] = past_HLE[kept]
        self._matches[: len(kept)] = matches_H[kept].tolist()

    def forget(self, requests: Collection[int]) -> None:
        """Drop running requests without keeping their matrices."""
        for request in requests:
            del self.running[request]


def unit_rows(counts: np.ndarray) -> np.ndarray:
    """Normalize rows to length one; rows without counts stay zero."""
    norms = np.sqrt(np.square(counts).sum(axis=-1, keepdims=True))
    return counts / np.maximum(norms, 1.0)
