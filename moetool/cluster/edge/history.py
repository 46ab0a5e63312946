"""Counts of a cluster since its head started, the local compute share over time, and every decision."""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from moetool.base.config import parse
from moetool.base.validation import require_plain
from moetool.cluster.edge.protocol import WorkerStats
from moetool.placement.replacement_record import ReplacementRecord

_WINDOWS = 240
_LATENCIES = 512
_DECISIONS = 200


class ReportHistory:
    """Sums of workers' reports since the start, calls in time windows, and re-placement decisions.

    In long runs neighbouring windows are merged in pairs, so that there are at most 240.

    Args:
        window_s: initial length of a window in seconds.

    Attributes:
        decisions: the last 200, of earlier heads too.
    """

    def __init__(self, num_servers: int, window_s: float = 10.0) -> None:
        self.decisions: deque[ReplacementRecord] = deque(maxlen=_DECISIONS)
        self._num_servers, self._window_s = num_servers, window_s
        self._began_s: float | None = None
        self._windows: list[dict[str, Any]] = []
        self._bytes_NN = np.zeros((num_servers, num_servers))
        self._migrated_N = np.zeros(num_servers)
        self._latest: dict[int, dict[str, Any]] = {}
        self._request_s: list[deque[float]] = [deque(maxlen=_LATENCIES) for _ in range(num_servers)]
        self._requests_N, self._failed_N = np.zeros(num_servers, int), np.zeros(num_servers, int)

    def add(self, stats: WorkerStats, now_s: float) -> None:
        n = stats.server
        window = self._window(now_s)
        window["local"][n] += stats.local_pairs
        window["remote"][n] += stats.remote_pairs
        for other, size in stats.bytes_out.items():
            self._bytes_NN[n, other] += size
        self._migrated_N[n] += stats.migrated_bytes
        self._request_s[n].extend(stats.request_s)
        self._requests_N[n] += len(stats.request_s)
        self._failed_N[n] += stats.failed
        self._latest[n] = {
            "at_s": now_s,
            "waiting": stats.waiting,
            "expert_s": stats.expert_s / stats.expert_pairs if stats.expert_pairs else None,
            "tokens": float(stats.tokens_LE.sum()),
            "seconds": stats.seconds,
            "memory_bytes": dict(stats.memory_bytes),
        }

    @property
    def local(self) -> float | None:
        """Local compute share of all counted expert calls; None before the first."""
        local = sum(sum(window["local"]) for window in self._windows)
        calls = local + sum(sum(window["remote"]) for window in self._windows)
        return local / calls if calls else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object: latencies are percentiles of the last 512 requests of each server."""
        return {
            "local": self.local,
            "began_s": self._began_s,
            "windows": self._windows,
            "bytes": self._bytes_NN.tolist(),
            "migrated": self._migrated_N.tolist(),
            "latest": {str(n): values for n, values in self._latest.items()},
            "latency": [
                {
                    "requests": int(self._requests_N[n]),
                    "failed": int(self._failed_N[n]),
                    "p50_s": float(np.percentile(found, 50)) if found else None,
                    "p95_s": float(np.percentile(found, 95)) if found else None,
                }
                for n, found in enumerate(self._request_s)
            ],
            "decisions": self.decisions_json(),
        }

    def decisions_json(self) -> list[dict[str, Any]]:
        """The decisions as JSON objects, which `restore` reads."""
        return [decision.to_json() for decision in self.decisions]

    def restore(self, decisions: Iterable[dict[str, Any]]) -> None:
        """Continue an earlier head's decisions. Raises: MismatchError, UsageError: they are none."""
        known = {one.name for one in fields(ReplacementRecord)}
        for decision in decisions:
            values = {name: value for name, value in decision.items() if name in known}
            require_plain("decisions", values)
            record = parse(ReplacementRecord, values, "decision")
            require_plain("decisions", asdict(record))  # a string may be a number that is none
            self.decisions.append(record)

    def _window(self, now_s: float) -> dict[str, Any]:
        if self._began_s is None:
            self._began_s = now_s
        number = int(max(0.0, now_s - self._began_s) // self._window_s)
        until_s = self._began_s + (number + 1) * self._window_s
        if not self._windows or self._windows[-1]["until_s"] < until_s:
            if len(self._windows) >= _WINDOWS:
                self._join()
                return self._window(now_s)
            nothing = [0] * self._num_servers
            self._windows.append({"until_s": until_s, "local": [*nothing], "remote": [*nothing]})
        return self._windows[-1]

    def _join(self) -> None:
        """Merge windows in pairs, each of twice the length."""
        assert self._began_s is not None
        self._window_s *= 2
        joined: dict[int, dict[str, Any]] = {}
        for window in self._windows:
            number = int((window["until_s"] - self._began_s - 1e-9) // self._window_s)
            if number not in joined:
                joined[number] = {**window, "until_s": self._began_s + (number + 1) * self._window_s}
                continue
            for name in ("local", "remote"):
                joined[number][name] = [a + b for a, b in zip(joined[number][name], window[name], strict=True)]
        self._windows = list(joined.values())
