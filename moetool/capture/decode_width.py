"""The number of requests that decode together, by the bytes that a token is expected to cost.

Many requests together need nearly every expert at each step, and divide these reads, and the step's pass over the dense
weights, among many tokens. Few requests together may find their experts in the slots again. Which one costs less
depends on the model's routes.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from moetool.base.types import ModelSpec, Phase
from moetool.trace.rows import TokenBatch

PROBE_STEPS = 8
"""Steps of a request alone, and then of all together, before the width is chosen from their routes."""
_MEASURED = 8  # requests whose routes are counted
_WINDOW = 32  # newest steps of each of them
_MEMORY_SPEED = 32  # times as fast as experts arrive, memory is read: 1,008 and 31.5 GB/s of an RTX 4090
_NEAR = 1.05  # cost of a wider step that is as good as the least one: estimates are rough


class DecodeWidth:
    """Chooses how many requests of a batch decode together.

    The first request decodes alone, and its routes show how often experts return. Then the width is chosen again
    whenever a request ends or begins. It depends on the routes and the number of slots alone, so equal compositions
    give equal widths, whatever is resident.

    Args:
        slots: expert slots; 0: all requests decode together.
        requests: requests of the batch, in their order.
        dense_bytes: dense weights that a step reads from memory.
    """

    def __init__(self, spec: ModelSpec, slots: int, requests: Sequence[int], dense_bytes: int = 0) -> None:
        self._step_reads = dense_bytes / spec.slot_bytes / _MEMORY_SPEED  # of experts that take as long as a step
        self._bounds = list(pairwise(accumulate(spec.top_k_L, initial=0)))
        self._experts_L = spec.num_experts_L
        self._slots = slots / spec.num_layers
        self._num_requests = len(requests)
        self._steps: dict[int, list[np.ndarray]] = {}  # routes of decoded tokens [S], newest last
        self._prompt_ends: dict[int, np.ndarray] = {}  # routes of each prompt's last token
        self._running = 0  # requests at the last choice
        self._next_choice = PROBE_STEPS
        self.width = len(requests) if slots == 0 else 1

    @property
    def fixed(self) -> bool:
        """Whether routes have no influence."""
        return self._slots == 0 or self._num_requests == 1

    def observe(self, rows: TokenBatch, running: int) -> None:
        """Learn from the rows of the newest forwards, and choose the width of the next ones.

        Args:
            running: requests that have begun and not ended.
        """
        if self.fixed:
            return
        for request in np.unique(rows.request_T).tolist():
            mine = np.flatnonzero(rows.request_T == request)
            decoded = mine[rows.phase_T[mine] == Phase.DECODE]
            if len(decoded) < len(mine):
                self._prompt_ends[request] = rows.experts_TS[mine[rows.phase_T[mine] == Phase.PREFILL][-1]]
            if request in self._steps or len(self._steps) < _MEASURED:
                kept = self._steps.setdefault(request, [])
                kept.extend(rows.experts_TS[decoded])
                del kept[:-_WINDOW]
        longest = max((len(steps) for steps in self._steps.values()), default=0)
        self._running = self._running or running
        if longest >= self._next_choice or (longest and running != self._running):
            self._next_choice, self._running = 2 * max(longest, PROBE_STEPS), running
            self.width = self._best(max(1, running))

    def _best(self, most: int) -> int:
        widths = [min(1 << power, most) for power in range((most - 1).bit_length() + 1)]
        costs = [min(self._narrow(width), self._wide(width)) + self._step_reads / width for width in widths]
        limit = _NEAR * min(costs)
        return next(width for width, cost in reversed(list(zip(widths, costs, strict=True))) if cost <= limit)

    def _narrow(self, width: int) -> float:
        """Reads per token if each request keeps its share of the slots for its own experts."""
        misses = tokens = 0
        for steps in self._steps.values():
            if len(steps) > 1:
                misses += sum(
                    _misses([set(step[start:end].tolist()) for step in steps], self._slots / width)
                    for start, end in self._bounds
                )
                tokens += len(steps) - 1
        return misses / tokens if tokens else float("inf")

    def _wide(self, width: int) -> float:
        """Reads per token if the experts of a step are independent of those of the step before."""
        routes_RS = np.stack(list(self._prompt_ends.values()))
        reads = 0.0
        for (start, end), experts in zip(self._bounds, self._experts_L, strict=True):
            uses_E = np.bincount(routes_RS[:, start:end].reshape(-1), minlength=experts) / len(routes_RS)
            needed = float((1 - (1 - np.minimum(uses_E, 1)) ** width).sum())
            reads += needed * max(0.0, 1 - self._slots / experts)
        return reads / width


def _misses(steps: Sequence[set[int]], slots: float) -> int:
    """Misses of LRU after the first step."""
    recent: dict[int, int] = dict.fromkeys(steps[0], 0)  # last step of each expert
    misses = 0
    for number, needed in enumerate(steps[1:], start=1):
        order = sorted(recent, key=recent.__getitem__, reverse=True)
        misses += len(needed - set(order[: int(slots)]))
        recent.update(dict.fromkeys(needed, number))
    return misses
