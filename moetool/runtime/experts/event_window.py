"""A server's most recent forwards as its policy saw them: experts needed, hits and misses."""

import threading
from collections import deque
from dataclasses import dataclass, replace

from moetool.base.types import ForwardInfo, GateEvent
from moetool.caching.residency import Counts

MOST_EVENTS = 4096
MOST_ROWS = 1 << 16
"""Most (token, layer) choices in a window; each takes about 130 bytes."""


@dataclass(frozen=True, slots=True)
class WindowForward:
    """One forward.

    Attributes:
        events: events by layer, without the optional columns that some policies use.
        counts: hits, late hits and misses of its experts.
        reserved_slots: expert slots reserved for prompts and the KV cache while it ran.
    """

    info: ForwardInfo
    events: tuple[GateEvent, ...]
    counts: Counts
    reserved_slots: int = 0


class EventWindow:
    """Keeps the most recent complete forwards, at most `MOST_EVENTS` events and `MOST_ROWS` rows.

    `begin`, `add` and `end` belong to the model's thread, `forwards` may be called from any.
    """

    def __init__(self, most_events: int = MOST_EVENTS, most_rows: int = MOST_ROWS) -> None:
        self._most_events, self._most_rows = most_events, most_rows
        self._lock = threading.Lock()
        self._forwards: deque[WindowForward] = deque()
        self._events = self._rows = 0
        self._current: list[GateEvent] = []
        self._before = Counts()
        self.passed = 0
        """Number of forwards so far, including dropped ones."""

    def begin(self, counts: Counts) -> None:
        """Begin a forward; `counts` are those before it."""
        self._current, self._before = [], counts

    def add(self, event: GateEvent) -> None:
        self._current.append(event)

    def end(self, info: ForwardInfo, counts: Counts, reserved_slots: int = 0) -> None:
        """End the forward, complete or not; `reserved_slots` were reserved."""
        bare = info if info.embedding_TD is None else replace(info, embedding_TD=None)
        events = tuple(
            event
            if event.forward is bare and event.is_bare
            else GateEvent(forward=bare, layer=event.layer, experts_TK=event.experts_TK)
            for event in self._current
        )
        self._current = []
        with self._lock:
            self._forwards.append(WindowForward(bare, events, counts - self._before, reserved_slots))
            self._events += len(events)
            self._rows += len(events) * len(info.request_T)
            self.passed += 1
            while self._forwards and (self._events > self._most_events or self._rows > self._most_rows):
                dropped = self._forwards.popleft()
                self._events -= len(dropped.events)
                self._rows -= len(dropped.events) * len(dropped.info.request_T)

    def forwards(self) -> list[WindowForward]:
        """The events in the window, oldest first."""
        with self._lock:
            return list(self._forwards)
