"""LRU: evicts the least recently used expert."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.compiled_events import kernels


@dataclass(frozen=True, kw_only=True)
class Options(policy.AdmissionOptions):
    """Options of LRU; by value, an expert is worth more if its use before the event's is later."""


class Policy(policy.Policy):
    """Evicts the least recently used expert; loads on demand.

    With one pool for all layers and at most (L-1)*K slots, the hit rate at batch 1 is 0: the other layers use that many
    experts before a layer comes again.
    """

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._order: OrderedDict[int, int] = OrderedDict()  # residents, least recently used first, by time of use
        self._time = 0
        self._used: dict[int, int] | None = (
            {} if getattr(options, "admit", "") == "value" else None
        )  # also of experts without slots
        self._before: dict[int, int] = {}  # of each miss, its use before the event's

    @property
    def compiles(self) -> bool:
        return type(self) is Policy

    def compile_into(self, table: memoryview) -> Mapping[int, Any]:
        return {kernels().KIND: kernels().LRU}

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        for key in hits:
            self._order.move_to_end(key)
            self._order[key] = self._time = self._time + 1
        if self._used is not None:
            self._before = {key: self._used.get(key, -1) for key in misses}
            self._time += 1  # misses that get no slot are used later than all before, too
            self._used |= dict.fromkeys([*hits, *misses], self._time)
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self._order[key] = self._time = self._time + 1

    def removed(self, key: int) -> None:
        del self._order[key]

    def evict(self, locked: Collection[int]) -> int:
        return next(key for key in self._order if key not in locked)

    def worth(self, keys: Sequence[int]) -> Sequence[float]:
        return [self._before.get(key, 0) for key in keys]

    def evict_for_admission(self, key: int, locked: Collection[int]) -> int | None:
        return self._if_worth_less(self.evict(locked), key)

    def evict_among_for_admission(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        return self._if_worth_less(self.evict_among(candidates, residents), key)

    def _if_worth_less(self, victim: int, key: int) -> int | None:
        return victim if self._used is None or self._before[key] > self._order[victim] else None

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        return min(candidates, key=self._order.__getitem__)
