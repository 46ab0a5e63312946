"""HybriMoE: prefetches where it shortens a coming layer most, shares misses between host and link, keeps by score."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.caching import _policy as policy
from moetool.caching._host_split import HostCosts, tokens_of, two_pointers
from moetool.errors import UsageError
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options(HostCosts):
    """Options of HybriMoE.

    Attributes:
        distance: how many layers ahead it prefetches.
        alpha: share of the last event's scores in an expert's running score S; the rest is what it was before.
    """

    distance: int = 3
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance < 1 or not 0 < self.alpha <= 1:
            raise UsageError(
                f"policy hybrimoe: distance is {self.distance} and alpha {self.alpha}, expected 1 or more and "
                f"above 0 to 1"
            )


class Policy(policy.Policy):
    """Asks the next layers' routers about this layer's hidden states, and weighs host against link within a layer.

    Source: HybriMoE (Zhong et al., 2025, arXiv 2504.05897) and its public code (github.com/PKU-SEC-Lab/HybriMoE). The
    lowest "Minus Recent Score" is evicted: S <- alpha TopP(s) + (1 - alpha) S, where TopP keeps the scores s of the P
    highest experts and is 0 for the others; alpha = 0.5 and P = 2k are those of the code. Experts of the next three
    layers are prefetched by simulated gain. Readings and deviations:
        - With several tokens in an event, TopP is averaged over them; the code looks at the first alone.
        - All layers share the pool unless slots are given out by layer; the code has a cache for each layer.
        - The experts that the event needs, and those prefetched for layers still to come in this forward, go last.
        - The code prefetches the next layer's experts of the highest S. Here, as in the paper, the coming layers'
          routers are asked, and the gain is simulated.
        - A coming layer needs the union of its tokens' predicted top-k. The gain of prefetching one of its missing
          experts is what that takes off the layer's longer side, with host and link shared out as in `on_host`; then
          the next, and so on. Prefetched are those with a gain, the largest first, of several the nearer layer's, the
          higher score first. Without costs every miss has the same gain.
        - A prefetch takes the place of no expert whose S is at least as high as the predicted score, from which alpha
          and TopP take nothing.
        - Within a layer the host gets the misses that the fewest tokens use, of several those of lower score; the link
          the others, each to the side that is done with it first. The code's schedule also counts the GPU's computing
          and may give the host what is resident. Costs are options, or with `live` averages of late; without them the
          host computes nothing.
        - Kernels, quantisation and the order of the experts on the GPU are kTransformers' and left out.
    """

    needs = frozenset({"experts", "logits", "ahead"})
    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self.computes_on_host = options.splits
        self.live_costs = options.splits and options.live
        self._costs: HostCosts = options.at_first()
        size = spec.num_layers * spec.num_experts  # one place for each key
        self._score_E = np.zeros(size)
        self._resident_E = np.zeros(size, bool)
        self._shield: set[int] = set()  # what the current event needs
        self._ahead: set[int] = set()  # prefetched for later layers of this forward
        self._wanted: dict[int, float] = {}  # for prefetching, with the predicted score

    def begin_forward(self, info: Any) -> Sequence[int]:
        self._ahead.clear()
        return ()

    def take_costs(self, load_s: float, host_s: float) -> None:
        self._costs = self._costs.measured(load_s, host_s)

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        assert event.scores_TE is not None
        base = self.spec.expert_key(event.layer, 0)
        mean_E, tokens_E = event.scores_TE.mean(axis=0, dtype=np.float64), tokens_of(event, self.spec)
        ranked = sorted(misses, key=lambda key: (-tokens_E[key - base], -mean_E[key - base], key))
        seconds = [self._costs.seconds(tokens_E[key - base]) for key in ranked]
        return ranked[two_pointers(seconds, self._costs.load_s, finish=True) :]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        assert event.scores_TE is not None
        top = min(2 * self.spec.top_k_L[event.layer], event.scores_TE.shape[1])
        order_TE = np.argsort(-event.scores_TE, axis=1, kind="stable")[:, :top]
        counted_TE = np.zeros_like(event.scores_TE)
        np.put_along_axis(counted_TE, order_TE, np.take_along_axis(event.scores_TE, order_TE, axis=1), axis=1)
        base = self.spec.expert_key(event.layer, 0)
        score_E = self._score_E[base : base + counted_TE.shape[1]]
        score_E += self.options.alpha * (counted_TE.mean(axis=0, dtype=np.float64) - score_E)
        end = self.spec.expert_key(event.layer + 1, 0)
        self._ahead = {key for key in self._ahead if key >= end}
        self._shield = {*hits, *misses}
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        assert event.ahead_ATE is not None
        gains: list[tuple[float, int, int, int, float]] = []
        for distance, scores_TE in enumerate(event.ahead_ATE[: self.options.distance], start=1):
            gains += self._gains(event.layer + distance, scores_TE)
        self._wanted = {key: score for _, _, _, key, score in sorted(gains)}
        return list(self._wanted)

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        self._shield.clear()
        return ()

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident_E[key] = True
        if prefetched:
            self._ahead.add(key)

    def removed(self, key: int) -> None:
        self._resident_E[key] = False
        self._ahead.discard(key)

    def evict(self, locked: Collection[int]) -> int:
        key = self._lowest({*locked, *self._shield, *self._ahead})
        if key is None:
            key = self._lowest(locked)
        assert key is not None
        return key

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        lowest = self._lowest({*locked, *self._shield, *self._ahead})
        return None if lowest is None or self._score_E[lowest] >= self._wanted[key] else lowest

    def _gains(self, layer: int, scores_TE: np.ndarray) -> list[tuple[float, int, int, int, float]]:
        """(-gain, layer, place, key, score) of the missing experts that a coming layer seems to need.

        The gain of one is what it and the next few save together, a load, if the earlier ones are prefetched too: one
        alone often saves nothing, since the host takes as long as the link. Where nothing is saved, none is named.
        """
        order_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, : self.spec.top_k_L[layer]]
        base = self.spec.expert_key(layer, 0)
        mean_E = scores_TE.mean(axis=0, dtype=np.float64)
        tokens_E = np.bincount(order_TK.reshape(-1), minlength=scores_TE.shape[1])
        missing = [e for e in np.flatnonzero(tokens_E).tolist() if not self._resident_E[base + e]]
        missing.sort(key=lambda e: (-tokens_E[e], -mean_E[e], e))
        seconds = [self._costs.seconds(int(tokens_E[e])) for e in missing]
        spans = [self._span(seconds[first:]) for first in range(len(missing) + 1)]
        gains = []
        least = float("inf")  # of those before: a later one is worth nothing without them
        for i, e in enumerate(missing):
            least = min(least, max((spans[i] - spans[end]) / (end - i) for end in range(i + 1, len(spans))))
            if least <= 0:
                break
            gains.append((-least, layer, i, base + e, float(mean_E[e])))
        return gains

    def _span(self, host_s: list[float]) -> float:
        """Seconds until both link and host have finished a layer's misses."""
        if not self.options.splits:
            return float(len(host_s))
        loaded = two_pointers(host_s, self._costs.load_s, finish=True)
        return max(loaded * self._costs.load_s, sum(host_s[loaded:]))

    def _lowest(self, kept: Collection[int]) -> int | None:
        standing_E = np.where(self._resident_E, self._score_E, np.inf)
        standing_E[list(kept)] = np.inf
        key = int(standing_E.argmin())
        return key if np.isfinite(standing_E[key]) else None
