"""Foresight that also knows the experts of the next layers, to measure what such knowledge is worth; replay only."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.caching import foresight
from moetool.config import Span, require_within
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options(foresight.Options):
    """Options of foresight, without prefetching by default.

    Attributes:
        layers: next layers whose experts are known and stay, over as many tokens as that takes.
    """

    prefetch: bool = False
    layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within(self, "policy known_routes: ", layers=Span(1))


class Policy(foresight.Policy):
    """Evicts as foresight does, but keeps what the next `layers` events need, while others can go.

    Source: moetool.
    """

    needs_future = True

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._coming: Sequence[Sequence[int]] = ()
        self._event = 0
        self._known: set[int] = set()

    def foresee(self, events: Sequence[Sequence[int]]) -> None:
        self._coming = events

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._event += 1
        self._known = set().union(*self._coming[self._event : self._event + self.options.layers])
        return super().gate(event, hits, misses)

    def evict(self, locked: Collection[int]) -> int:
        kept = {key for key in self._known if self._resident[key]}.union(locked)
        return super().evict(kept if len(kept) < sum(self._resident) else locked)

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        return super().evict_among([key for key in candidates if key not in self._known] or candidates, residents)
