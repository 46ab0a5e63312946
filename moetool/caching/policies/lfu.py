"""LFU: evicts the least frequently used expert."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.compiled_events import kernels


@dataclass(frozen=True, kw_only=True)
class Options(policy.AdmissionOptions):
    """Options of LFU; by value, an expert is worth more if it has more uses.

    Attributes:
        forget: whether an eviction resets an expert's count.
    """

    forget: bool = False


class Policy(policy.Policy):
    """Evicts the expert with the fewest uses (ties: least recently used); loads on demand.

    A use is an event that needs the expert, with any number of tokens.
    """

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._by_value = getattr(options, "admit", "") == "value"
        self._uses: dict[int, tuple[int, int]] = {}  # key -> (uses, time of the last one)
        self._compiled_2A: np.ndarray | None = None  # the same by key, if events are compiled
        self._table = memoryview(b"")
        self._resident: set[int] = set()
        # Entries may be stale. Uses only grow, so a stale entry is too near the top and is corrected when it gets
        # there; a use needs no heap operation.
        self._heap: list[tuple[int, int, int]] = []  # (uses, time, key), at least one entry per resident
        self._time = 0

    @property
    def compiles(self) -> bool:
        return type(self) is Policy

    def compile_into(self, table: memoryview) -> Mapping[int, Any]:
        k, num = kernels(), self.spec.num_layers * self.spec.num_experts
        self._table, self._compiled_2A = table, np.zeros((2, num), np.int64)
        self._fill_compiled()
        kind = k.FORGETFUL_LFU if self.options.forget else k.LFU
        return {k.KIND: kind, k.USES: self._time, k.USES_A: self._compiled_2A[0], k.USED_A: self._compiled_2A[1]}

    def _fill_compiled(self) -> None:
        assert self._compiled_2A is not None
        self._compiled_2A[:] = 0
        for key, use in self._uses.items():
            self._compiled_2A[:, key] = use

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        for key in hits:
            self._use(key)
        for key in misses:
            self._use(key)
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident.add(key)
        heappush(self._heap, (*self._uses.get(key, (0, 0)), key))

    def removed(self, key: int) -> None:
        self._resident.discard(key)
        if self.options.forget:
            self._uses.pop(key, None)

    def evict(self, locked: Collection[int]) -> int:
        heap, held = self._heap, []
        while True:
            uses, time, key = heap[0]
            if key not in self._resident:
                heappop(heap)
            elif (uses, time) != (now := self._uses.get(key, (0, 0))):
                heapreplace(heap, (*now, key))
            elif key in locked:
                held.append(heappop(heap))
            else:
                heappop(heap)
                for entry in held:
                    heappush(heap, entry)
                return key

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        return min(candidates, key=lambda key: self._uses.get(key, (0, 0)))

    def worth(self, keys: Sequence[int]) -> Sequence[float]:
        return [self._uses.get(key, (0, 0))[0] if self._by_value else 0 for key in keys]

    def evict_for_admission(self, key: int, locked: Collection[int]) -> int | None:
        victim = self.evict(locked)
        if self._is_worth_more(key, victim):
            return victim
        heappush(self._heap, (*self._uses.get(victim, (0, 0)), victim))
        return None

    def evict_among_for_admission(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        victim = self.evict_among(candidates, residents)
        return victim if self._is_worth_more(key, victim) else None

    def _is_worth_more(self, key: int, victim: int) -> bool:
        uses, others = self.worth([key, victim])
        return not self._by_value or uses > others

    def _use(self, key: int) -> None:
        self._time += 1
        self._uses[key] = (self._uses.get(key, (0, 0))[0] + 1, self._time)

    def _known_uses(self) -> dict[int, tuple[int, int]]:
        if self._compiled_2A is None:
            return self._uses
        keys = np.flatnonzero(self._compiled_2A[0])
        uses, times = self._compiled_2A[:, keys].tolist()
        return dict(zip(keys.tolist(), zip(uses, times, strict=True), strict=True))

    def expected_use(self) -> Mapping[int, float]:
        return {key: float(uses) for key, (uses, _) in self._known_uses().items()}

    def state(self) -> dict[str, np.ndarray]:
        rows = [(key, *use) for key, use in sorted(self._known_uses().items())]
        return {"uses_N3": np.array(rows, np.int64).reshape(-1, 3)}  # key, uses, time of the last one

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        rows = state["uses_N3"]
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(f"uses_N3 has shape {rows.shape}")
        self._uses = {key: (uses, time) for key, uses, time in rows.tolist()}
        self._time = int(rows[:, 2].max(initial=0))
        if self._compiled_2A is not None:
            self._fill_compiled()
            self._table[kernels().USES] = self._time
