"""MoESys: a ring of two layers in memory; the whole next layer is fetched while one computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policies import lru
from moetool.caching.policies.layerwise import layer_keys
from moetool.caching.policy import MIN_SLOTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


class Policy(lru.Policy):
    """Prefetches all experts of the next layer while a layer computes, and evicts each layer after its last expert.

    It never misses, and moves every expert of the model in every forward. It uses two layers of memory at most.

    Source: MoESys (Yu et al., 2024), its inference with ring memory, as DuoServe-MoE §§ 6.1 and 6.3 describe its
    baseline: all expert weights of a layer are fetched to the GPU. Readings and deviations:
        - The first MoE layer is fetched when the forward begins. The paper's ring fetches it during the end of the
          previous forward, which moves the same bytes.
        - The fetch of the next layer begins after this layer's first expert is computed, since a prefetch waits for the
          event's misses.
        - A server computes each expert as soon as it is resident, and drops a fetch that has not begun when its slot is
          reused. It then reads less than is counted here and waits for less than the whole layer. Both favour this
          baseline.
        - Only one level below the pool is modelled, without SSD and parameter server.
    """

    prefetch_distance = 1

    @classmethod
    def min_slots(cls, spec: ModelSpec, options: Any) -> int:
        return max(MIN_SLOTS, *spec.num_experts_L, *map(sum, pairwise(spec.num_experts_L)))

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        return min(num_slots, cls.min_slots(spec, options))

    @classmethod
    def reloads(cls, spec: ModelSpec, num_slots: int) -> bool:
        return True

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        return layer_keys(self.spec, 0)

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer = event.layer + 1
        return layer_keys(self.spec, layer) if layer < self.spec.num_layers else ()

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return [key for key in layer_keys(self.spec, event.layer) if key in self._order]
