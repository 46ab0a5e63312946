"""Loading on demand, as Accelerate's offloading does ("ACC" in the papers): the baseline without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching.policies import lru
from moetool.caching.policy import MIN_SLOTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


class Policy(lru.Policy):
    """Loads each expert when it is called, and evicts all experts of a layer at its end.

    The hit rate is 0: no expert stays for the next event. Loads and computations alternate.

    Source: Accelerate's `AlignDevicesHook`, which loads a module's weights before its forward and drops them after it.
    Deviations, neither of which changes the loads or their order:
        - The pool has K slots (at least two), as in DuoServe-MoE § 6.3 and Table 2.
        - A slot is freed at the end of its layer, not of its expert.
    """

    in_order = True

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Options, num_slots: int) -> int:
        return min(num_slots, max(MIN_SLOTS, *spec.top_k_L))

    @classmethod
    def reloads(cls, spec: ModelSpec, num_slots: int) -> bool:
        return True

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return list(self._order)
