"""Layerwise: loads whole layers on demand, as DeepSpeed-Inference does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching.policies import lru
from moetool.caching.policy import MIN_SLOTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


class Policy(lru.Policy):
    """Loads all experts of a layer when the layer begins, needed or not; evicts the least recently used layer.

    It predicts nothing, and computes only when the whole layer is resident. Slots beyond one layer cache earlier
    layers. Layers are used in a cycle, and the evicted layer is always the next one needed. With up to (L-1)*E slots
    the hit rate is therefore 0.

    Source: DeepSpeed-Inference (Aminabadi et al., SC22), as FineMoE § 6.1 describes its baseline: "expert-agnostic
    layer-wise parameter offloading approach, which uses pure on-demand loading and does not support prefetching", with
    an expert cache added. Readings and deviations:
        - The paper does not say how that cache evicts. Here it evicts the least recently used layer, expert by expert
          as slots are needed, and never the current layer.
        - FineMoE § 6.2 counts no misses, since all experts are resident after the router has chosen. Here a hit is an
          expert that was resident when the event began. The layer's other experts count as loaded ahead, and as wasted
          if unused.
        - The layer is loaded after its router has chosen, not before its attention. This changes no decision, and an
          on-demand loader overlaps nothing either way.
    """

    @classmethod
    def min_slots(cls, spec: ModelSpec, options: Any) -> int:
        return max(MIN_SLOTS, spec.num_experts)

    @classmethod
    def reloads(cls, spec: ModelSpec, num_slots: int) -> bool:
        return num_slots <= spec.total_experts - spec.num_experts

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        layer = layer_keys(self.spec, event.layer)
        for key in layer:
            if key in self._order:
                self._order.move_to_end(key)
        missing = set(misses)
        return misses + [key for key in layer if key not in missing]


def layer_keys(spec: ModelSpec, layer: int) -> list[int]:
    """Return the keys of all experts of a layer."""
    return [spec.expert_key(layer, expert) for expert in range(spec.num_experts_L[layer])]
