"""Moving averages of expert load and host compute times, for policies that weigh the two."""

from collections import deque

_MOVED = 0.1
"""Smallest relative change of an average that is reported to a policy: few reports keep the log small."""
_EVERY = 16


class CostMeter:
    """Averages over the last loads and host computations. Every method may be called from any thread.

    Source: SMoE, section V-A: "the past p instances of these times".

    Args:
        past: p; the paper gives no value.
    """

    def __init__(self, past: int = 32) -> None:
        self._load_s: deque[float] = deque(maxlen=past)
        self._host_s: deque[float] = deque(maxlen=past)
        self._reported = (0.0, 0.0)
        self._loads = 0

    def loaded(self, seconds: float) -> None:
        """Record a load's seconds, from first byte to last."""
        self._load_s.append(seconds)

    def hosted(self, seconds: float) -> None:
        """Record the seconds of an expert on the host."""
        self._host_s.append(seconds)

    def due(self) -> bool:
        """Whether to wait for this load and time it, on a device that copies asynchronously: one in 16."""
        self._loads += 1
        return self._loads % _EVERY == 1

    def changed_means(self) -> tuple[float, float] | None:
        """Return mean seconds of a load and of a host computation, both known, if one changed by a tenth; else None."""
        load_s, host_s = list(self._load_s), list(self._host_s)
        if not load_s or not host_s:
            return None
        means = sum(load_s) / len(load_s), sum(host_s) / len(host_s)
        if all(abs(mean - old) <= _MOVED * old for mean, old in zip(means, self._reported, strict=True)):
            return None
        self._reported = means
        return means
