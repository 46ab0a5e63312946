"""Layer by layer, as DeepSpeed-Inference offloads: a layer is there as a whole or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetool.caching import lru
from moetool.caching._policy import MIN_SLOTS
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loading layer by layer has nothing to choose."""


class Policy(lru.Policy):
    """Loads all experts of a layer when the layer begins, needed or not; the layer used longest ago goes first.

    It predicts nothing and computes nothing before the whole layer is there. What the pool holds beyond one layer
    caches earlier layers. They come round in a ring and the one that goes is the next to be needed, so up to
    (L-1)*E slots nothing hits.

    Source: DeepSpeed-Inference (Aminabadi et al., SC22), as FineMoE describes its baseline: "expert-agnostic
    layer-wise parameter offloading, which uses pure on-demand loading and does not support prefetching", with an
    expert cache added. Readings and deviations:
        - The print doesn't say how that cache evicts. Here: whole layers, least recently used first, expert by
          expert as slots are needed, never of the current layer.
        - FineMoE says that it has no misses, because all experts are there when the router has chosen. Here a hit
          is what was there when the event began; the layer's other experts count as loaded ahead, and as wasted
          when they go unused.
        - The layer is loaded when its router has chosen and not when its attention begins: that decides nothing,
          and an on-demand loader overlaps nothing either way.
    """

    @classmethod
    def min_slots(cls, spec: ModelSpec, options: Any) -> int:
        return max(MIN_SLOTS, spec.num_experts)

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        layer = layer_keys(self.spec, event.layer)
        for key in layer:
            if key in self._order:
                self._order.move_to_end(key)
        missing = set(misses)
        return misses + [key for key in layer if key not in missing]


def layer_keys(spec: ModelSpec, layer: int) -> list[int]:
    """The keys of all experts of a layer."""
    return [spec.expert_key(layer, expert) for expert in range(spec.num_experts_L[layer])]
