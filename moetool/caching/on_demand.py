"""Loading on demand, as Accelerate's offloading does ("ACC" in the papers): the baseline without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.caching import lru
from moetool.caching._policy import MIN_SLOTS
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loading on demand has nothing to choose."""


class Policy(lru.Policy):
    """Loads each expert when it is called and gives up all of a layer's experts when the layer is done.

    It hits nothing, by construction: no expert stays for the next event. Loads and computations alternate.

    Source: Accelerate's `AlignDevicesHook`, which moves a module's weights in before its forward and drops them
    after it. Deviations: the pool is the K slots that DuoServe's Table 2 gives its baselines (two at least), and
    a slot is freed at the end of its layer and not of its expert. Neither changes what is loaded or when.
    """

    in_order = True

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Options, num_slots: int) -> int:
        return min(num_slots, max(MIN_SLOTS, *spec.top_k_L))

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return list(self._order)
