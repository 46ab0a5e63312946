"""The ways from one server to the others: how fast they are made to be, and the bytes that went over them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from moetool.cluster.frames import LinkError


class Bucket:
    """A token bucket: lets a sender go on only as fast as a link would take what it sends.

    Every message waits for as long as its own bytes take, behind those that were sent before it.

    Args:
        bytes_s: rate at which tokens come.
        latency_s: added to every message.
        clock, sleep: of the time that it goes by.
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
        self._free_at = -float("inf")  # when all that was sent would be over, sent at the rate

    def take(self, num_bytes: int, by: float) -> None:
        """Wait until this many bytes would have arrived. Raises: LinkError, at the time `by`, if that is later."""
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
    """One server's ways to the others.

    Args:
        buckets: by server, where a link is emulated.
    """

    def __init__(self, buckets: Mapping[int, Bucket] | None = None) -> None:
        self._buckets = dict(buckets or {})
        self._sent: Counter[int] = Counter()
        self._lock = threading.Lock()

    def sending(self, server: int, num_bytes: int, by: float) -> None:
        """So many bytes are about to be sent: count them, and wait for as long as they take. Raises: LinkError."""
        with self._lock:
            self._sent[server] += num_bytes
        if (bucket := self._buckets.get(server)) is not None:
            bucket.take(num_bytes, by)

    @property
    def bytes_out(self) -> dict[int, int]:
        """Bytes sent to each server so far, calls and answers."""
        with self._lock:
            return dict(self._sent)
