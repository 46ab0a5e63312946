"""MoESys: a ring of two layers in memory; one computes while the whole next one is fetched."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moetool.caching import lru
from moetool.caching._policy import MIN_SLOTS
from moetool.caching.layerwise import layer_keys
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """MoESys has nothing to choose."""


class Policy(lru.Policy):
    """Prefetches all experts of the next layer while a layer computes, and gives up the layer that is done.

    It never misses and moves every expert of the model in every forward, however few of them are used. More memory
    than two layers is of no use to it.

    Source: MoESys (Yu et al., 2024), its inference with ring memory, as DuoServe-MoE describes its baseline: all
    expert weights of a layer are deployed, and fetching them outlasts computing. Readings and deviations:
        - The first MoE layer is fetched when the forward begins; the print's ring fetches it while the previous
          forward ends, which moves the same bytes.
        - The fetch of the next layer begins once this layer's first expert is computed, not before: here a
          prefetch waits for the event's misses.
        - When served, an expert is computed as soon as it is there itself, and a fetch that has not begun when its
          slot is needed again is dropped: the server then reads less than is counted here, and a layer waits for
          less than its whole. Both favour this baseline.
        - The levels above host memory (SSD, parameter server) are not modelled: there is one below the pool.
    """

    prefetch_distance = 1

    @classmethod
    def min_slots(cls, spec: ModelSpec, options: Any) -> int:
        return max(MIN_SLOTS, *spec.num_experts_L, *map(sum, pairwise(spec.num_experts_L)))

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        return min(num_slots, cls.min_slots(spec, options))

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        return layer_keys(self.spec, 0)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer = event.layer + 1
        return layer_keys(self.spec, layer) if layer < self.spec.num_layers else ()

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return [key for key in layer_keys(self.spec, event.layer) if key in self._order]
