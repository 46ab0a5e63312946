"""Belady: evicts the expert whose next use is farthest. It needs the future, so it is a bound for replays only."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy

_NEVER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of Belady.

    Attributes:
        whole_events: keep all experts of an event until its end, as textbooks and published curves do. Otherwise an
            expert may be evicted as soon as it is computed, which takes fewer loads.
    """

    whole_events: bool = False


class Policy(policy.Policy):
    """Makes the fewest loads of all policies that load on demand and keep each loaded expert, for given events.

    An event is computed in order: residents, then one miss after another. The miss with the soonest next use comes
    last, since the last loaded expert must stay.

    Source: Belady 1966, extended to events that need several experts. Two experts whose next use is the same event are
    not equal. The one that is absent then is loaded and may have to stay, so it should be the one needed sooner
    *after* that event; random ties cost loads. Uses are therefore ordered by time and, within an event, in the reverse
    order of the following uses. `foresee` numbers all uses in this order; the highest number is evicted.
    """

    needs_future = True
    in_order = True

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._following: list[dict[int, int]] = []  # for each event: key -> number of its next use after it
        self._event = 0
        self._next: dict[int, int] = {}  # number of the next use, for residents and the event's misses
        self._heap: list[tuple[int, int]] = []  # (-number of next use, key), stale entries among them
        self._resident: set[int] = set()
        self._held: list[int] = []  # with `whole_events`: the event's residents, kept out of the heap

    def foresee(self, events: Sequence[Sequence[int]]) -> None:
        coming: dict[int, int] = {}
        end = sum(map(len, events))
        never = count(_NEVER)  # distinct, so that the order of equal experts does not depend on the heap
        for keys in reversed(events):
            following = {key: coming[key] if key in coming else next(never) for key in keys}
            self._following.append(following)
            start = end - len(keys)
            coming.update(zip(sorted(keys, key=following.__getitem__, reverse=True), range(start, end), strict=True))
            end = start
        self._following.reverse()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        following = self._following[self._event]
        self._event += 1
        self._release()
        self._next.update(following)
        for key in hits:
            self._offer(key)
        return sorted(misses, key=following.__getitem__, reverse=True)

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident.add(key)
        self._offer(key)

    def removed(self, key: int) -> None:
        self._resident.discard(key)

    def evict(self, locked: Collection[int]) -> int:
        assert not locked  # in order: earlier experts are computed before a miss is loaded
        while True:
            if not self._heap:
                self._release()  # the event is larger than the pool
            number, key = heappop(self._heap)
            if key in self._resident and -number == self._next[key]:
                return key

    def _offer(self, key: int) -> None:
        if self.options.whole_events:
            self._held.append(key)
        else:
            heappush(self._heap, (-self._next[key], key))

    def _release(self) -> None:
        for key in self._held:
            heappush(self._heap, (-self._next[key], key))
        self._held.clear()
