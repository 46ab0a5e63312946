"""Moving averages of expert load and host compute times, for policies that weigh the two."""

from collections import deque

_MOVED = 0.1
"""Relative change of an average that is reported to a policy: few changes keep the log small."""
_EVERY = 16


class CostMeter:
    """Averages over the last loads and host computations. Every method may be called from any thread.

    Source: SMoE, section V-A: "the past p instances of these times".

    Args:
        past: p, which is not printed.
    """

    def __init__(self, past: int = 32) -> None:
        self._load_s: deque[float] = deque(maxlen=past)
        self._host_s: deque[float] = deque(maxlen=past)
        self._told = (0.0, 0.0)
        self._loads = 0

    def loaded(self, seconds: float) -> None:
        """A load took so long, from its first byte to its last."""
        self._load_s.append(seconds)

    def hosted(self, seconds: float) -> None:
        """An expert took the host so long."""
        self._host_s.append(seconds)

    def due(self) -> bool:
        """Whether this load is to be waited for, on a device that else copies beside everything: one in 16."""
        self._loads += 1
        return self._loads % _EVERY == 1

    def news(self) -> tuple[float, float] | None:
        """Mean seconds of a load and of the host, where one has moved by a tenth; None while either is unknown."""
        load_s, host_s = list(self._load_s), list(self._host_s)
        if not load_s or not host_s:
            return None
        means = sum(load_s) / len(load_s), sum(host_s) / len(host_s)
        if all(abs(mean - told) <= _MOVED * told for mean, told in zip(means, self._told, strict=True)):
            return None
        self._told = means
        return means
