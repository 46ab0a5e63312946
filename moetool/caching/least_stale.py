"""Least-Stale: evicts experts that the running forward has not used, first in, first out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from moetool.caching import _policy as policy
from moetool.types import ForwardInfo, GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


class Policy(policy.Policy):
    """Evicts stale experts first (last used by an earlier forward), then experts of the running forward.

    A forward visits the layers in order, so an expert that it has used is not needed before the next forward.

    Source: SpecMD (Hoang et al., arXiv 2602.03921, 2026), the eviction policy Least-Stale, without its prefetching.
    Reading: both groups are first in, first out, by the time at which an expert became resident or was last used.
    """

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._fresh: dict[int, None] = {}
        self._stale: dict[int, None] = {}

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self._stale.update(self._fresh)
        self._fresh.clear()
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        for key in hits:
            self._stale.pop(key, None)
            self._fresh[key] = None
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self._fresh[key] = None

    def removed(self, key: int) -> None:
        self._stale.pop(key, None)
        self._fresh.pop(key, None)

    def evict(self, locked: Collection[int]) -> int:
        return next(key for key in chain(self._stale, self._fresh) if key not in locked)

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        among = set(candidates)
        return next(key for key in chain(self._stale, self._fresh) if key in among)
