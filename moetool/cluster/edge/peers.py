"""The other servers, as one of them sees them: where they are, whom to ask, and how they have answered."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import Frame, LinkError
from moetool.cluster.links import Links
from moetool.cluster.transport import CallRefused, Channel

_LOG = logging.getLogger(__name__)

_BACKOFF_S = (1.0, 30.0)  # after the first failure, and at most
_SHARE = 0.2  # of the newest call in the average
_SLOWER = 2.0  # than the slowest call of late is no longer usual
_WINDOW_S = 30.0  # the slowest call is of this window and the one before


class Peers:
    """Channels to the other servers, and the choice among those that have an expert.

    Args:
        server: the number of this one.
        identity: of this server.
        distance: by server what a call costs before anything is computed; only its order matters.
        links: of this server.
        clock: by which a server that failed is left alone for a while.

    Effects: `update` makes channels, each with a thread; `close` ends them.
    """

    def __init__(
        self,
        server: int,
        identity: Identity,
        distance: Sequence[float],
        *,
        links: Links | None = None,
        limit_bytes: int = 2**30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self._identity, self._limit_bytes = identity, limit_bytes
        self._links = links or Links()
        self.distance = tuple(distance)
        self._clock = clock
        self._lock = threading.Lock()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._channels: dict[tuple[int, str], Channel] = {}
        self._outstanding: Counter[int] = Counter()  # pairs that were sent and are not answered
        self._pair_s: dict[int, float] = {}
        self._failures: Counter[int] = Counter()
        self._away_until: dict[int, float] = {}
        self._excess_s: dict[int, tuple[int, float, float]] = {}  # by server: window, slowest in it and in the last one
        self._overdue: Counter[int] = Counter()  # calls that were given up waiting for, and may still be answered

    def update(self, addresses: Sequence[tuple[str, int] | None]) -> None:
        """Update the servers' addresses; calls to one that moved or left fail."""
        found = {n: (str(at[0]), int(at[1])) for n, at in enumerate(addresses) if at is not None and n != self.server}
        with self._lock:
            changed = {n for n in self._addresses.keys() | found.keys() if self._addresses.get(n) != found.get(n)}
            self._addresses = found
            _LOG.debug("addresses of servers: %s", found)
            closing = [self._channels.pop(at) for at in list(self._channels) if at[0] in changed]
            for n in changed:
                self._failures.pop(n, None)
                self._away_until.pop(n, None)
                self._excess_s.pop(n, None)
        for channel in closing:
            channel.close()

    def choose(
        self, servers: Collection[int], pairs: int, tried: Collection[int] = (), *, wait: bool = False
    ) -> int | None:
        """Whom to ask for an expert's products: the nearest, of equally near ones the least loaded.

        The load is the pairs that were sent there and are not answered, times the seconds that a pair took lately. One
        that owes an answer (`overdue`) is not asked.

        Args:
            servers: that have the expert.
            pairs: to be computed.
            tried: that are not to be asked.
            wait: whether one that owes an answer is asked if all do: nobody else can compute the expert.

        Returns:
            None where all are gone, were tried or have failed so lately that they are left alone.
        """
        now = self._clock()
        with self._lock:
            able = [
                n
                for n in servers
                if n in self._addresses and n not in tried and self._away_until.get(n, now) <= now and n != self.server
            ]
            prompt = [n for n in able if not self._overdue[n]]
            able = prompt if prompt or not wait else able
            return min(able, key=lambda n: (self.distance[n], self._load(n, pairs), n), default=None)

    def expect(self, server: int, pairs: int) -> None:
        """So many pairs are about to be sent there (negative: are answered, or given up)."""
        with self._lock:
            self._outstanding[server] += pairs

    def call(
        self, server: int, head: Mapping[str, Any], parts: Sequence[Any], *, timeout_s: float, lane: str = "compute"
    ) -> "Future[Frame]":
        """As `Channel.call`. Lanes have a channel each, so that a long transfer keeps no short call waiting."""
        with self._lock:
            channel = self._channels.get((server, lane))
            if channel is None and server in self._addresses:
                channel = self._channels[server, lane] = Channel(
                    server,
                    self._addresses[server],
                    self._identity,
                    caller=self.server,
                    links=self._links,
                    limit_bytes=self._limit_bytes,
                )
        if channel is None:
            answer: Future[Frame] = Future()
            answer.set_exception(LinkError(f"server {server} is unavailable"))
            return answer
        return channel.call(head, parts, timeout_s=timeout_s)

    def answered(self, server: int, pairs: int, seconds: float) -> None:
        """A call took so long."""
        with self._lock:
            self._failures.pop(server, None)
            self._away_until.pop(server, None)
            latest = seconds / max(1, pairs)
            before = self._pair_s.get(server, latest)
            self._pair_s[server] = before + _SHARE * (latest - before)
            window, excess_s = int(self._clock() // _WINDOW_S), seconds - pairs * before
            seen, slowest_s, last_s = self._excess_s.get(server, (window, 0.0, 0.0))
            if seen != window:
                slowest_s, last_s = 0.0, slowest_s if seen == window - 1 else 0.0
            self._excess_s[server] = window, max(slowest_s, excess_s), last_s

    def usual_s(self, server: int, pairs: int) -> float | None:
        """Seconds in which a call for so many pairs is answered unless something is wrong; None: nothing is known.

        Twice what the pairs take by the running average and the slowest call of the last half minute took on top. What
        another server took stands in for one that has not been called.
        """
        with self._lock:
            if not self._pair_s:
                return None
            pair_s = self._pair_s.get(server) or max(self._pair_s.values())
            found = self._excess_s.get(server)
            excess_s = max(found[1:]) if found else max((max(one[1:]) for one in self._excess_s.values()), default=0.0)
            return _SLOWER * (pairs * pair_s + excess_s)

    def overdue(self, server: int, pairs: int, waited_s: float, answer: "Future[Frame]") -> None:
        """A call is late: the server is not asked again before it is answered or has failed.

        An answer that comes counts as one that took twice as long as it was waited for: a server that is always slower
        is soon waited for, and one that stood still for long is not from now on.
        """
        with self._lock:
            self._overdue[server] += 1
        _LOG.info("server %d owes an answer for %.3g s: others are asked", server, waited_s)

        def end(late: "Future[Frame]") -> None:
            with self._lock:
                self._overdue[server] -= 1
            error = late.exception()
            if error is None or isinstance(error, CallRefused):
                self.answered(server, pairs, 2 * waited_s)
            else:
                self.failed(server)

        answer.add_done_callback(end)

    def failed(self, server: int) -> None:
        """A call broke off or took too long: the server is left alone for a second, then for twice as long, ..."""
        with self._lock:
            self._failures[server] += 1
            first, most = _BACKOFF_S
            away_s = min(most, first * 2 ** (self._failures[server] - 1))
            self._away_until[server] = self._clock() + away_s
        _LOG.info("server %d failed %d times in a row: not called for %g s", server, self._failures[server], away_s)

    def close(self) -> None:
        """End all channels; calls that wait fail."""
        self.update(())

    def _load(self, server: int, pairs: int) -> float:
        return (self._outstanding[server] + pairs) * self._pair_s.get(server, 0.0)
