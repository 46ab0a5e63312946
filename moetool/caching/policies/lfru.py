"""LFRU: evicts the expert with the fewest uses per time since its last use."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.compiled_events import kernels


@dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


class Policy(policy.Policy):
    """Evicts the expert with the lowest uses / (time since its last use); loads on demand.

    Time is counted in uses. An expert's uses start from zero when it returns.

    Source: the expert cache of vLLM pull request 37190 (open as of 2026), which gives every layer its own slots, as
    `--pool layer` does here. Deviation: one clock for all layers, so that one pool can use the policy too.
    """

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        size = spec.num_layers * spec.num_experts
        self._uses_A = np.zeros(size, np.int64)  # 0: not resident
        self._last_A = np.zeros(size, np.int64)
        self._clock = 0

    @property
    def compiles(self) -> bool:
        return type(self) is Policy

    def compile_into(self, table: memoryview) -> Mapping[int, Any]:
        return {kernels().KIND: kernels().LFRU}

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        for key in hits:
            self._use(key)
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self._use(key)

    def removed(self, key: int) -> None:
        self._uses_A[key] = 0

    def evict(self, locked: Collection[int]) -> int:
        keys = np.flatnonzero(self._uses_A)
        order = np.argsort(self._scores(keys), kind="stable") if locked else [np.argmin(self._scores(keys))]
        return next(int(keys[i]) for i in order if int(keys[i]) not in locked)

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        keys = np.fromiter(candidates, np.int64, len(candidates))
        return int(keys[np.argmin(self._scores(keys))])

    def _use(self, key: int) -> None:
        self._clock += 1
        self._uses_A[key] += 1
        self._last_A[key] = self._clock

    def _scores(self, keys: np.ndarray) -> np.ndarray:
        return self._uses_A[keys] / (self._clock - self._last_A[keys] + 1)
