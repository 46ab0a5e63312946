"""MoE-Infinity: prefetches by the earlier request with the most similar expert use; evicts by LFU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.config import Span, require_within
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policies import _lfu_ahead
from moetool.prediction.request_matrices import ActivationMatrices


@dataclass(frozen=True, kw_only=True)
class Options(_lfu_ahead.AheadOptions):
    """Options of MoE-Infinity.

    Attributes:
        history: number of kept activation matrices of earlier requests.
        distance: number of layers ahead to prefetch.
    """

    history: int = 128
    distance: int = 3

    def __post_init__(self) -> None:
        require_within(self, "policy moe_infinity: ", history=Span(1, 2**20), distance=Span(1))


class Policy(_lfu_ahead.LfuAhead):
    """Matches the running request's activation matrix with those of earlier requests, and prefetches their experts.

    An activation matrix counts the tokens of a request that used each expert of each layer. Similarity is the cosine of
    each layer's counts, averaged over layers. After every event, the most similar earlier request gives the probability
    p of each expert in the coming layers. The likeliest experts are prefetched in the order of
    p * (1 - (l - l_now) / (L + 1)). The policy learns online and starts without history.

    Source: MoE-Infinity (Xue et al., 2024), its published code, and FineMoE's description (§§ 2.4, 4.2, 4.5:
    request-level matrices, popular experts for the first layers, LFU). Readings and deviations:
        - The code enqueues every expert of all coming layers, and the link's speed limits the queue. Here decisions
          must not depend on time: for each coming layer, up to `distance` layers ahead, it prefetches as many experts
          as the current event needed. FineMoE's authors profiled a distance of three for such systems.
        - Before the first gate of a forward, the first MoE layer gets its most used experts of all time.
        - The code masks the stored matrices up to the current layer and compares the later layers. Here the running
          request's matrix so far is compared wherever it has counts.
        - The expert with the fewest uses is evicted (ties: least recently used). Experts prefetched for later layers of
          this forward are evicted last. The topological weights in the code's eviction score for encoder-decoders are
          left out.
        - In a forward of several requests, their matches' probabilities are added, weighted by their tokens.
        - A full history drops the request that matched least often, as the code does (ties: the oldest slot). Ended
          requests join it when the next forward begins, in the order of their numbers.
    """

    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        past_HLE = np.zeros((options.history, spec.num_layers, spec.num_experts), np.float32)
        self.matrices = ActivationMatrices(past_HLE)
        self._ended: list[int] = []

    def begin_request(self, request: int) -> None:
        self.matrices.begin(request)

    def end_request(self, request: int) -> None:
        self._ended.append(request)

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        super().begin_forward(info)
        for request in sorted(self._ended):
            self.matrices.remember(request)
        self._ended.clear()
        first = [key for key in range(self.spec.num_experts_L[0]) if key in self._uses]
        first.sort(key=lambda key: -self._uses[key][0])
        return first[: self.spec.top_k_L[0] * len(info.request_T)]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self.matrices.observe(event)
        return super().gate(event, hits, misses)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer, num_layers = event.layer, self.spec.num_layers
        last = min(layer + self.options.distance, num_layers - 1)
        if layer == last or not self.matrices.num_past:
            return ()
        self.searches += len(set(event.forward.request_T))
        chance_LE = self.matrices.chances(event.forward.request_T, slice(layer + 1, last + 1))
        wanted: list[tuple[float, int]] = []
        for ahead, chance_E in enumerate(chance_LE, start=1):
            weight = 1 - ahead / (num_layers + 1)
            likeliest = np.argsort(-chance_E, kind="stable")[: len(event.needed)]
            wanted += [
                (-chance * weight, self.spec.expert_key(layer + ahead, expert))
                for expert, chance in zip(likeliest.tolist(), chance_E[likeliest].tolist(), strict=True)
                if chance > 0
            ]
        return [key for _, key in sorted(wanted)]

    def state(self) -> dict[str, np.ndarray]:
        """Return the uses, the earlier requests' matrices (float32), and their numbers of matches."""
        return {**super().state(), **self.matrices.state()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.matrices.restore(state)
        super().restore(state)
