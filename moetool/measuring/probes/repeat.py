"""Repetition of measurements within a time budget."""

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from moetool.costing.costs import Curve

_SHORTEST_S = 1e-9  # a difference of two timings may be 0


class Timings:
    """Measured seconds for each amount (tokens, bytes)."""

    def __init__(self) -> None:
        self._seconds: dict[float, list[float]] = defaultdict(list)

    def add(self, amount: float, seconds: float) -> None:
        self._seconds[amount].append(max(seconds, _SHORTEST_S))

    def curve(self) -> Curve:
        """Return the curve through the medians; of several timings of an amount, the first is a warm-up."""
        return Curve.fit({amount: seconds[1:] or seconds for amount, seconds in self._seconds.items()})


def repeat(measurements: Sequence[Callable[[], None]], seconds: float, most: int = 30) -> None:
    """Run each measurement once, in order, then repeatedly the one with the least total time until the time is up.

    Cheap measurements are therefore not starved by expensive ones, and disturbances spread over all.

    Args:
        measurements: functions that record their own timings.
        seconds: time budget, after which only measurements that never ran begin.
        most: maximum runs of each.
    """
    began = time.perf_counter()
    queue = [(0.0, 0, number) for number in range(len(measurements))]  # total time, runs, index
    while queue:
        spent, times, number = heapq.heappop(queue)
        start = time.perf_counter()
        if times and start - began >= seconds:
            return
        measurements[number]()
        if times + 1 < most:
            heapq.heappush(queue, (spent + time.perf_counter() - start, times + 1, number))
