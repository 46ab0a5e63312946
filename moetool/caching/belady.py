"""Belady: evicts what is needed again latest. It knows the future, so it is a bound and cannot serve."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from moetool.caching import _policy as policy
from moetool.types import GateEvent, ModelSpec

_NEVER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of Belady.

    Attributes:
        whole_events: give up nothing that the event needs before the event is over, as textbooks and published curves
            have it; otherwise an expert may go as soon as it is computed, which costs fewer loads.
    """

    whole_events: bool = False


class Policy(policy.Policy):
    """No policy that loads on demand and admits what it loads makes fewer loads on the same events and slots.

    It serves an event in order (residents, then one miss after the other) and loads the miss that is needed
    again soonest last, because the last one loaded is the one that has to stay.

    Source: Belady 1966, for events that need several experts at once. Two experts that are next needed by the
    same event are then not alike: the one that is absent there is loaded and may have to stay, so it had better
    be the one that is needed sooner *after* it. Breaking such ties at random costs loads. Hence the order of
    preference among uses is by time and, within one event, the reverse of the order of the uses that follow;
    `foresee` numbers all uses in that order, from the last to the first, and the highest number is evicted.
    """

    needs_future = True
    in_order = True

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._following: list[dict[int, int]] = []  # for each event: key -> number of its next use after it
        self._event = 0
        self._next: dict[int, int] = {}  # of the residents and the event's misses
        self._heap: list[tuple[int, int]] = []  # (-number of next use, key), stale entries among them
        self._resident: set[int] = set()
        self._held: list[int] = []  # with `whole_events`: the event's residents, kept out of the heap

    def foresee(self, events: Sequence[Sequence[int]]) -> None:
        coming: dict[int, int] = {}
        end = sum(map(len, events))
        never = count(_NEVER)  # equal in worth, but the order must not depend on the heap
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
        assert not locked  # in order: all that came before is computed when a miss is loaded
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
