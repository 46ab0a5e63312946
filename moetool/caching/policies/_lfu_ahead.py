"""LFU for policies that prefetch several layers ahead: experts prefetched for later layers are evicted last."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import Any, ClassVar

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policies import lfu


@dataclass(frozen=True, kw_only=True)
class AheadOptions(lfu.Options):
    """Options of LFU, and of eviction by prefetches.

    Attributes:
        evict_lower_only: whether a prefetch may evict only experts used at most as often as its own. The published
            systems have no such rule.
    """

    REFUSED: ClassVar[dict[str, str]] = {"spare": "it is called evict_lower_only"}

    evict_lower_only: bool = False


class LfuAhead(lfu.Policy):
    """LFU that evicts experts prefetched for later layers last."""

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._ahead: set[int] = set()  # prefetched for later layers of this forward

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self._ahead.clear()
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        end = self.spec.expert_key(event.layer + 1, 0)
        self._ahead = {key for key in self._ahead if key >= end}
        return super().gate(event, hits, misses)

    def admit(self, key: int, prefetched: bool) -> None:
        super().admit(key, prefetched)
        if prefetched:
            self._ahead.add(key)

    def removed(self, key: int) -> None:
        super().removed(key)
        self._ahead.discard(key)

    def evict(self, locked: Collection[int]) -> int:
        kept = self._ahead.union(locked)
        return super().evict(kept if len(kept) < len(self._resident) else locked)

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        kept = self._ahead.union(locked)
        if len(kept) == len(self._resident):
            return None
        coldest = super().evict(kept)
        uses, time = self._uses.get(coldest, (0, 0))
        if self.options.evict_lower_only and uses > self._uses.get(key, (0, 0))[0]:
            heappush(self._heap, (uses, time, coldest))  # not evicted
            return None
        return coldest
