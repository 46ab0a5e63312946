"""History of a cluster: local compute shares, bytes and latencies over time, and every decision."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from moetool.cluster.edge.protocol import WorkerStats
from moetool.config import parse
from moetool.placement._replacement_record import ReplacementRecord
from moetool.validation import require, require_plain, require_positive

_WINDOWS = 240
_LATENCIES = 512
_DECISIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    until_s: float
    local: list[float]
    remote: list[float]
    bytes: float
    migrated: float
    requests: int
    request_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Format of `ReportHistory.to_json`."""

    window_s: float
    began_s: float | None
    windows: list[_Window]
    bytes: list[list[float]]
    migrated: list[float]
    latest: dict[int, dict[str, float | None]]
    request_s: list[list[float]]
    requests: list[int]
    failed: list[int]
    decisions: list[dict[str, Any]]


class ReportHistory:
    """History of workers' reports: counts in time windows, and re-placement decisions.

    In long runs neighbouring windows are merged in pairs, so that there are at most 240.

    Args:
        window_s: initial length of a window in seconds.

    Attributes:
        decisions: the last 200.
    """

    def __init__(self, num_servers: int, window_s: float = 10.0) -> None:
        self.decisions: list[ReplacementRecord] = []
        self._num_servers, self._window_s = num_servers, window_s
        self._began_s: float | None = None
        self._windows: list[dict[str, Any]] = []
        self._bytes_NN = np.zeros((num_servers, num_servers))
        self._migrated_N = np.zeros(num_servers)
        self._latest: dict[int, dict[str, Any]] = {}
        self._request_s: list[deque[float]] = [deque(maxlen=_LATENCIES) for _ in range(num_servers)]
        self._requests_N, self._failed_N = np.zeros(num_servers, int), np.zeros(num_servers, int)

    def add(self, stats: WorkerStats, now_s: float) -> None:
        """Count a worker's report."""
        n = stats.server
        window = self._window(now_s)
        window["local"][n] += stats.local_pairs
        window["remote"][n] += stats.remote_pairs
        for other, size in stats.bytes_out.items():
            self._bytes_NN[n, other] += size
            window["bytes"] += size
        window["migrated"] += stats.migrated_bytes
        window["requests"] += len(stats.request_s)
        window["request_s"] += sum(stats.request_s)
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
        }

    def decide(self, decision: ReplacementRecord) -> None:
        """Keep a decision; the same object may be completed later."""
        self.decisions = [*self.decisions, decision][-_DECISIONS:]

    @property
    def local(self) -> float | None:
        """Local compute share of all counted expert calls; None before the first."""
        local = sum(sum(window["local"]) for window in self._windows)
        calls = local + sum(sum(window["remote"]) for window in self._windows)
        return local / calls if calls else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object, which `restore` reads."""
        return {
            "window_s": self._window_s,
            "began_s": self._began_s,
            "windows": self._windows,
            "bytes": self._bytes_NN.tolist(),
            "migrated": self._migrated_N.tolist(),
            "latest": {str(n): values for n, values in self._latest.items()},
            "request_s": [[round(one, 6) for one in requests] for requests in self._request_s],
            "requests": self._requests_N.tolist(),
            "failed": self._failed_N.tolist(),
            "decisions": [decision.to_json() for decision in self.decisions],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore a state of `to_json` with as many servers. Raises: MismatchError, UsageError: it does not fit."""
        kept = parse(_Kept, values, "history")
        count = self._num_servers
        require_plain("history", asdict(kept))
        require_positive("history.window_s", kept.window_s)
        require(bool(kept.windows) == (kept.began_s is not None), "history.began_s", kept.began_s, "as the windows")
        bytes_NN = np.array(kept.bytes, float)
        require(bytes_NN.shape == (count, count), "history.bytes", bytes_NN.shape, f"{count} times {count}")
        for name in ("migrated", "request_s", "requests", "failed"):
            require(len(getattr(kept, name)) == count, f"history.{name}", len(getattr(kept, name)), f"{count}")
        for window in kept.windows:
            lengths = len(window.local), len(window.remote)
            require(lengths == (count, count), "history.windows", lengths, f"{count} servers")
        require(set(kept.latest) <= set(range(count)), "history.latest", sorted(kept.latest), f"of {count} servers")
        self._window_s, self._began_s = kept.window_s, kept.began_s
        self._windows = [asdict(window) for window in kept.windows]
        self._bytes_NN, self._migrated_N = bytes_NN, np.array(kept.migrated, float)
        self._latest = {n: dict(found) for n, found in kept.latest.items()}
        self._request_s = [deque(requests, maxlen=_LATENCIES) for requests in kept.request_s]
        self._requests_N, self._failed_N = np.array(kept.requests, int), np.array(kept.failed, int)
        known = {one.name for one in fields(ReplacementRecord)}
        self.decisions = [
            parse(ReplacementRecord, {name: value for name, value in decision.items() if name in known}, "decision")
            for decision in kept.decisions
        ]

    def summary(self) -> dict[str, Any]:
        """Like `to_json`, with percentiles instead of latencies."""
        values = self.to_json()
        requests = values.pop("request_s")
        values["latency"] = [
            {
                "requests": int(self._requests_N[n]),
                "failed": int(self._failed_N[n]),
                "p50_s": float(np.percentile(found, 50)) if found else None,
                "p95_s": float(np.percentile(found, 95)) if found else None,
            }
            for n, found in enumerate(requests)
        ]
        values["local"] = self.local
        return values

    def _window(self, now_s: float) -> dict[str, Any]:
        if self._began_s is None:
            self._began_s = now_s
        number = int(max(0.0, now_s - self._began_s) // self._window_s)
        until_s = self._began_s + (number + 1) * self._window_s
        if not self._windows or self._windows[-1]["until_s"] < until_s:
            if len(self._windows) >= _WINDOWS:
                self._join()
                return self._window(now_s)
            self._windows.append(
                {
                    "until_s": until_s,
                    "local": [0] * self._num_servers,
                    "remote": [0] * self._num_servers,
                    **dict.fromkeys(("bytes", "migrated", "requests"), 0),
                    "request_s": 0.0,
                }
            )
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
            into = joined[number]
            for name in ("local", "remote"):
                into[name] = [a + b for a, b in zip(into[name], window[name], strict=True)]
            for name in ("bytes", "migrated", "requests", "request_s"):
                into[name] += window[name]
        self._windows = list(joined.values())
