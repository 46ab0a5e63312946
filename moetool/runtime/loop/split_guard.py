"""Whether the split of misses between link and host pays, by measured decode steps with it and without it."""

import statistics
from collections import deque

_SLOWER = 1.03  # steps with the split, relative to those without, from which on it ends


class SplitGuard:
    """Compares steps with and without the split, and chooses between requests.

    The first steps warm up. A comparison takes `window` steps with the split, as many without it, and as many with it
    again; each goes on until no request runs. If the split is slower, it ends. Otherwise it serves `windows` windows
    until the next comparison. Steps of equal numbers of requests are compared, by medians.

    Attributes:
        active: whether the split serves.
        ended: whether it ended for good.
        ratio: seconds with the split, relative to those without; None before the first comparison.
    """

    def __init__(self, window: int = 32, windows: int = 64) -> None:
        self.active, self.ended = True, False
        self.ratio: float | None = None
        self._window, self._windows = window, windows
        self._left = window  # steps until the next part may begin
        self._part = 0  # of the comparison: 0 is none, 1 and 3 with the split, 2 without
        self._with: dict[int, deque[float]] = {}
        self._without: dict[int, deque[float]] = {}

    def add(self, num_requests: int, seconds: float) -> None:
        """Add a decode step."""
        self._left -= 1
        if self._part and not self.ended:
            steps = self._without if self._part == 2 else self._with
            steps.setdefault(num_requests, deque(maxlen=self._window * (1 if self._part == 2 else 2))).append(seconds)

    def choose(self) -> bool:
        """Return whether the split serves the next requests; called while none runs."""
        if self._left > 0 or self.ended:
            return self.active
        self._part = (self._part + 1) % 4
        self._left = self._window
        if not self._part:
            self._conclude()
        self.active = self._part != 2 and not self.ended
        return self.active

    def _conclude(self) -> None:
        enough = self._window // 2
        ratios = [
            statistics.median(self._with[number]) / statistics.median(without)
            for number, without in self._without.items()
            if min(len(without), len(self._with.get(number, ()))) >= enough
        ]
        self._with.clear()
        self._without.clear()
        if ratios:
            self.ratio = statistics.median(ratios)
            self.ended = self.ratio > _SLOWER
            self._left = self._windows * self._window
