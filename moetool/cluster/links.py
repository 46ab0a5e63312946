"""A server's outgoing links: emulated rates, and bytes sent."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from moetool.cluster.frames import LinkError


class Bucket:
    """A token bucket that delays a sender as a link of a given rate would.

    A message waits for its own bytes, after all messages sent before it.

    Args:
        bytes_s: rate in bytes per second.
        latency_s: seconds added to every message.
        clock, sleep: replacements for `time.monotonic` and `time.sleep`.
    """

    def __init__(
        self,
        bytes_s: float,
        latency_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s, self._latency_s = bytes_s, latency_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = -float("inf")  # when all sent bytes have arrived

    def take(self, num_bytes: int, by: float = float("inf")) -> None:
        """Wait until these bytes would have arrived. Raises: LinkError at time `by` if they would arrive later."""
        if not num_bytes:  # nothing to queue behind other bytes
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_s
            wait = max(0.0, self._free_at - now) + self._latency_s
        if now + wait > by:
            self._sleep(max(0.0, by - now))
            raise LinkError("the link did not take a message in time")
        if wait > 0:
            self._sleep(wait)


class Links:
    """One server's links to the others.

    Args:
        buckets: emulated links by server; the others are not delayed.
    """

    def __init__(self, buckets: Mapping[int, Bucket] | None = None) -> None:
        self._buckets = dict(buckets or {})
        self._sent: Counter[int] = Counter()
        self._lock = threading.Lock()

    def sending(self, server: int, num_bytes: int, by: float) -> None:
        """Count bytes about to be sent, and wait for as long as an emulated link takes. Raises: LinkError."""
        with self._lock:
            self._sent[server] += num_bytes
        if (bucket := self._buckets.get(server)) is not None:
            bucket.take(num_bytes, by)

    def is_emulated(self, server: int) -> bool:
        """Whether `sending` may wait."""
        return server in self._buckets

    @property
    def bytes_out(self) -> dict[int, int]:
        """Bytes sent to each server so far, calls and answers."""
        with self._lock:
            return dict(self._sent)
