"""Counters of a server between two reports to the scheduler."""

import threading
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from moetool.base.types import ModelSpec
from moetool.cluster.edge.protocol import WorkerStats
from moetool.cluster.links import Links


class Meter:
    """Counters that any thread may increase, and that `take` resets.

    Args:
        links: links whose bytes are reported.

    Attributes:
        total: counted since the start: `local_pairs`, `remote_pairs`, `served_pairs` (for others),
            `calls`, `failed_calls`, `late_calls` (hedged), `late_drops` (experts dropped before they were computed
            here) and `last_resort` (experts that no server provided, read from the server's own disk for one event).
    """

    def __init__(self, server: int, spec: ModelSpec, links: Links) -> None:
        self._server, self._links = server, links
        self._shape = (spec.num_layers, spec.num_experts)
        self._lock = threading.Lock()
        self.total: Counter[str] = Counter()
        self._sent_before: dict[int, int] = {}
        self._reset()

    def needed(self, layer: int, pairs: dict[int, int]) -> None:
        """Count experts of a layer that the server's own tokens need, with the pairs of each."""
        with self._lock:
            for expert, count in pairs.items():
                self._tokens_LE[layer, expert] += count

    def computed(self, pairs: int, seconds: float, *, own: bool) -> None:
        """Count pairs computed here, for the server's own users or for others."""
        with self._lock:
            self._expert_s += seconds
            self._expert_pairs += pairs
            self._local += pairs if own else 0
            self.total["local_pairs" if own else "served_pairs"] += pairs

    def called(self, server: int, pairs: int, seconds: float) -> None:
        """Count pairs that another server computed for this server's users."""
        with self._lock:
            self._remote += pairs
            self._call_s[server] += seconds
            self._calls[server] += 1
            self._call_pairs[server] += pairs
            self.total["remote_pairs"] += pairs
            self.total["calls"] += 1

    def count(self, name: str, number: int = 1) -> None:
        """Count one event of `total`."""
        with self._lock:
            self.total[name] += number

    def migrated(self, num_bytes: int) -> None:
        """Count an expert copied to this server."""
        with self._lock:
            self._migrated += num_bytes

    def ended(self, seconds: float, *, failed: bool) -> None:
        """Count a finished request of the server's own users."""
        with self._lock:
            if failed:
                self._failed += 1
            else:
                self._request_s.append(seconds)

    def take(self, waiting: int) -> WorkerStats:
        """Return all counts since the last call; `waiting`: unfinished requests."""
        sent = self._links.bytes_out
        with self._lock:
            now = time.monotonic()
            stats = WorkerStats(
                server=self._server,
                seconds=now - self._since,
                tokens_LE=self._tokens_LE,
                local_pairs=self._local,
                remote_pairs=self._remote,
                expert_s=self._expert_s,
                expert_pairs=self._expert_pairs,
                call_s=dict(self._call_s),
                calls=dict(self._calls),
                call_pairs=dict(self._call_pairs),
                bytes_out={n: count - self._sent_before.get(n, 0) for n, count in sent.items()},
                migrated_bytes=self._migrated,
                request_s=tuple(self._request_s),
                failed=self._failed,
                waiting=waiting,
            )
            self._sent_before = sent
            self._reset()
        return stats

    def to_json(self) -> dict[str, Any]:
        """`total`, and the local compute share."""
        with self._lock:
            total = dict(self.total)
        here, away = total.get("local_pairs", 0), total.get("remote_pairs", 0)
        return {**total, "local_share": here / (here + away) if here + away else None}

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._tokens_LE = np.zeros(self._shape, np.int64)
        self._local = self._remote = self._expert_pairs = self._migrated = self._failed = 0
        self._expert_s = 0.0
        self._call_s: defaultdict[int, float] = defaultdict(float)
        self._calls: Counter[int] = Counter()
        self._call_pairs: Counter[int] = Counter()
        self._request_s: list[float] = []
