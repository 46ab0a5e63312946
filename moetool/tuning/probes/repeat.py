"""Repeating measurements within a budget of time."""

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from moetool.costing.costs import Curve

_SHORTEST_S = 1e-9  # a difference of two timings may come out as nothing


class Timings:
    """Seconds measured for each amount (tokens, bytes) of one thing."""

    def __init__(self) -> None:
        self._seconds: dict[float, list[float]] = defaultdict(list)

    def add(self, amount: float, seconds: float) -> None:
        """Note one timing."""
        self._seconds[amount].append(max(seconds, _SHORTEST_S))

    def curve(self) -> Curve:
        """The curve through the medians. The first timing of each amount is a warm-up, unless it is the only one."""
        return Curve.fit({amount: seconds[1:] or seconds for amount, seconds in self._seconds.items()})


def repeat(measurements: Sequence[Callable[[], None]], seconds: float, most: int = 30) -> None:
    """Make each measurement once, in order, then again and again whichever has had the least time, till it is up.

    So cheap measurements are not starved by dear ones, and what else the machine does is spread over all of them.

    Args:
        measurements: each notes its timings itself.
        seconds: after so long only measurements that were never made are begun.
        most: how often each is made at most.
    """
    began = time.perf_counter()
    queue = [(0.0, 0, number) for number in range(len(measurements))]  # time had, times made, which
    while queue:
        spent, times, number = heapq.heappop(queue)
        start = time.perf_counter()
        if times and start - began >= seconds:
            return
        measurements[number]()
        if times + 1 < most:
            heapq.heappush(queue, (spent + time.perf_counter() - start, times + 1, number))
