"""The other servers from one server's view: addresses, choice of holder, and response times."""

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
from moetool.cluster.transport import Answer, CallRefused, Channel

_LOG = logging.getLogger(__name__)

_BACKOFF_S = (1.0, 30.0)  # after the first failure, and at most
_SHARE = 0.2  # weight of the newest call in the average
_LINE_SHARE = 0.02  # least weight of the newest call in the line, which needs calls of several sizes
_SPREAD = 0.02  # least variance of pairs, relative to their mean, from which the line has a slope
_SLOWER = 2.0  # a call this much slower than the slowest recent one counts as late
_WINDOW_S = 30.0  # the slowest call of this window and the previous one counts
_MOST_EXCESS_S = 0.3  # assumed limit of that excess, so that occasional stalls do not lengthen later waits
_MOST_GROWTH = 4.0  # assumed: a call counts in the average as at most this many times slower than the average


class Peers:
    """Channels to the other servers, and the choice among holders of an expert.

    Args:
        server: number of this server.
        identity: identity of this server.
        distance: cost of a call without computation, by server; only its order matters.
        links: links of this server.
        limit_bytes, poll_s: as for `Channel`.
        clock: clock for the backoff after failures.

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
        poll_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = server
        self._identity, self._limit_bytes, self._poll_s = identity, limit_bytes, poll_s
        self._links = links or Links()
        self.distance = tuple(distance)
        self._clock = clock
        self._lock = threading.Lock()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._channels: dict[tuple[int, str], Channel] = {}
        self._outstanding: Counter[int] = Counter()  # pairs that were sent and are not answered
        self._pair_s: dict[int, float] = {}
        # By server: calls, and averages of pairs, seconds, pairs squared, and pairs times seconds.
        self._line: dict[int, tuple[float, ...]] = {}
        self._failures: Counter[int] = Counter()
        self._away_until: dict[int, float] = {}
        self._excess_s: dict[int, tuple[int, float, float]] = {}  # by server: window, slowest in it and in the last one
        self._overdue: Counter[int] = Counter()  # abandoned calls that may still be answered

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
        self,
        servers: Collection[int],
        pairs: int,
        tried: Collection[int] = (),
        called: Collection[int] = (),
        *,
        wait: bool = False,
    ) -> int | None:
        """Choose the server for an expert's products: the nearest, then the one that takes the fewest seconds.

        These are the seconds of its unanswered pairs and of these pairs, and those of a call unless it is called
        anyway. A server with an overdue answer (`overdue`) is not chosen.

        Args:
            servers: holders of the expert.
            pairs: pairs to compute.
            tried: servers to skip.
            called: servers that are called for other experts of the layer.
            wait: whether a server with an overdue answer is chosen if all have one, since no other can compute the
                expert.

        Returns:
            None if all are down, tried or in backoff.
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

            def rank(n: int) -> tuple[float, float, int]:
                # Of equal ones, the next after this server, so that not all servers call the first.
                return self.distance[n], self._needed_s(n, pairs, n in called), (n - self.server) % len(self.distance)

            return min(able, key=rank, default=None)

    def expect(self, server: int, pairs: int) -> None:
        """Count pairs about to be sent there (negative: answered or aborted)."""
        with self._lock:
            self._outstanding[server] += pairs

    def call(
        self, server: int, head: Mapping[str, Any], parts: Sequence[Any], *, timeout_s: float, lane: str = "compute"
    ) -> Answer:
        """Like `Channel.call`. Each lane has its own channel, so that a long transfer does not delay short calls."""
        with self._lock:
            channel = self._channels.get((server, lane))
            if channel is None and server in self._addresses:
                channel = self._channels[server, lane] = Channel(
                    server,
                    self._addresses[server],
                    self._identity,
                    links=self._links,
                    limit_bytes=self._limit_bytes,
                    poll_s=self._poll_s,
                )
        if channel is None:
            unsent: Future[Frame] = Future()
            unsent.set_exception(LinkError(f"server {server} is unavailable"))
            return unsent
        return channel.call(head, parts, timeout_s=timeout_s)

    def answered(self, server: int, pairs: int, seconds: float) -> None:
        """Record the seconds of a call."""
        with self._lock:
            self._failures.pop(server, None)
            self._away_until.pop(server, None)
            latest = seconds / max(1, pairs)
            before = self._pair_s.get(server, latest)
            self._pair_s[server] = before + _SHARE * (min(latest, _MOST_GROWTH * before) - before)
            counted_s = min(seconds, _MOST_GROWTH * pairs * before)
            calls, *line = self._line.get(server, (0.0,) * 5)
            share, point = max(_LINE_SHARE, 1 / (calls + 1)), (pairs, counted_s, pairs * pairs, pairs * counted_s)
            moved = (old + share * (new - old) for old, new in zip(line, point, strict=True))
            self._line[server] = calls + 1, *moved
            window, excess_s = int(self._clock() // _WINDOW_S), seconds - pairs * before
            seen, slowest_s, last_s = self._excess_s.get(server, (window, 0.0, 0.0))
            if seen != window:
                slowest_s, last_s = 0.0, slowest_s if seen == window - 1 else 0.0
            self._excess_s[server] = window, max(slowest_s, excess_s), last_s

    def usual_s(self, server: int, pairs: int) -> float | None:
        """Seconds within which a call for these pairs is normally answered; None: unknown.

        Twice the pairs' average time plus the largest excess of the last half minute, of which at most 0.3 s count. A
        server without calls takes another server's values.
        """
        with self._lock:
            if not self._pair_s:
                return None
            pair_s = self._pair_s.get(server) or max(self._pair_s.values())
            found = self._excess_s.get(server)
            excess_s = max(found[1:]) if found else max((max(one[1:]) for one in self._excess_s.values()), default=0.0)
            return _SLOWER * (pairs * pair_s + min(excess_s, _MOST_EXCESS_S))

    def overdue(self, server: int, pairs: int, waited_s: float, answer: Answer) -> None:
        """Mark a call as late: the server is not called again before it answers or fails.

        A late answer counts as twice the time waited for it, within the limits of `answered`. So a server that is
        always slow is soon given more time, and one that stalled once is not.
        """
        with self._lock:
            self._overdue[server] += 1
        _LOG.info("server %d has not answered for %.3g s: calling others", server, waited_s)

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
        """Record a failed or timed-out call: the server is skipped for 1 s, doubled with each failure, at most 30 s."""
        with self._lock:
            self._failures[server] += 1
            first, most = _BACKOFF_S
            away_s = min(most, first * 2 ** (self._failures[server] - 1))
            self._away_until[server] = self._clock() + away_s
        _LOG.info("server %d failed %d times in a row: not called for %g s", server, self._failures[server], away_s)

    def close(self) -> None:
        """End all channels; waiting calls fail."""
        self.update(())

    def _needed_s(self, server: int, pairs: int, is_called: bool) -> float:
        """Seconds until a server answers these pairs after the unanswered ones, by a line through recent calls."""
        _, mean, mean_s, square, product = self._line.get(server, (0.0, 1.0, 0.0, 1.0, 0.0))
        spread = square - mean * mean
        pair_s = (product - mean * mean_s) / spread if spread > _SPREAD * mean else 0.0
        pair_s = min(max(pair_s, 0.0), mean_s / mean)
        call_s = mean_s - pair_s * mean
        return (self._outstanding[server] + pairs) * pair_s + (0.0 if is_called else call_s)
