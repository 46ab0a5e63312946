"""HybriMoE: prefetches by simulated gain, splits misses between host and link, and evicts by score."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.host_split import HostCosts, tokens_of, two_pointers


@dataclass(frozen=True, kw_only=True)
class Options(HostCosts):
    """Options of HybriMoE.

    Attributes:
        distance: number of layers ahead to prefetch.
        alpha: weight of the last event's scores in an expert's running score S.
        evict_lower_only: whether a prefetch may evict only experts whose S is below its predicted score. Neither paper
            nor code has such a rule.
    """

    REFUSED: ClassVar[dict[str, str]] = {"spare": "it is called evict_lower_only"}

    distance: int = 3
    alpha: float = 0.5
    evict_lower_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance < 1 or not 0 < self.alpha <= 1:
            raise UsageError(
                f"policy hybrimoe: distance is {self.distance} and alpha {self.alpha}, expected a distance of 1 or "
                f"more, and an alpha above 0 and at most 1"
            )


class Policy(policy.Policy):
    """Applies the next layers' routers to this layer's hidden states, and splits misses between host and link.

    Source: HybriMoE (Zhong et al., 2025, arXiv 2504.05897) and its public code (github.com/PKU-SEC-Lab/HybriMoE). The
    expert with the lowest "Minus Recent Score" is evicted: S <- alpha TopP(s) + (1 - alpha) S, where TopP keeps the
    scores s of the P highest experts and is 0 for the others. alpha = 0.5 and P = 2k come from the code. Experts of the
    next three layers are prefetched by simulated gain. Readings and deviations:
        - For several tokens in an event, TopP is averaged over them; the code uses the first token only.
        - All layers share the pool unless layers have their own slots; the code has a cache per layer.
        - The event's experts, and those prefetched for later layers of this forward, are evicted last.
        - The code prefetches the next layer's experts with the highest S. Here, as in the paper, the coming layers'
          routers give scores, and the gain is simulated.
        - A coming layer needs the union of its tokens' predicted top-k. The gain of prefetching a missing expert is the
          time that it takes off the layer's longer side, with misses split as in `on_host`; further experts follow in
          turn. Experts with a gain are prefetched, the largest gain first, then the nearer layer, then the higher
          score. Without costs every miss has the same gain.
        - Within a layer, experts with fewer tokens, then lower scores, go to the host first; each expert goes to the
          side that finishes it first. The code's schedule also counts GPU compute and may move residents to the host.
          Costs are options, or recent averages with `live`; without them the host computes nothing.
        - Kernels, quantization and the order of experts on the GPU belong to KTransformers and are left out.
    """

    needs = frozenset({"experts", "logits", "ahead"})
    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self.computes_on_host = options.splits
        self.live_costs = options.splits and options.live
        self._costs: HostCosts = options.at_first()
        size = spec.num_layers * spec.num_experts  # arrays by key
        self._score_E = np.zeros(size)
        self._resident_E = np.zeros(size, bool)
        self._shield: set[int] = set()  # experts of the current event
        self._ahead: set[int] = set()  # prefetched for later layers of this forward
        self._wanted: dict[int, float] = {}  # experts to prefetch, with their predicted scores

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
        self.searches += len(event.ahead_ATE[: self.options.distance])
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
        if lowest is None or not self.options.evict_lower_only:
            return lowest
        return None if self._score_E[lowest] >= self._wanted[key] else lowest

    def _gains(self, layer: int, scores_TE: np.ndarray) -> list[tuple[float, int, int, int, float]]:
        """Return (-gain, layer, rank, key, score) of the missing experts that a coming layer is predicted to need.

        A single prefetch often saves nothing, since host and link take equally long. The gain of an expert is therefore
        the saving per load of it and the next ones, given that earlier ones are prefetched. Experts without a gain are
        left out.
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
        least = float("inf")  # gain of the earlier ones, without which a later one gains nothing
        for i, e in enumerate(missing):
            least = min(least, max((spans[i] - spans[end]) / (end - i) for end in range(i + 1, len(spans))))
            if least <= 0:
                break
            gains.append((-least, layer, i, base + e, float(mean_E[e])))
        return gains

    def _span(self, host_s: list[float]) -> float:
        """Return the seconds until link and host have finished a layer's misses."""
        if not self.options.splits:
            return float(len(host_s))
        loaded = two_pointers(host_s, self._costs.load_s, finish=True)
        return max(loaded * self._costs.load_s, sum(host_s[loaded:]))

    def _lowest(self, kept: Collection[int]) -> int | None:
        standing_E = np.where(self._resident_E, self._score_E, np.inf)
        standing_E[list(kept)] = np.inf
        key = int(standing_E.argmin())
        return key if np.isfinite(standing_E[key]) else None
