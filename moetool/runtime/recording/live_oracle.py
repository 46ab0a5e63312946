"""Replay a running server's recent events under other policies, to compare them with its own."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.policy import build_policy, policy_class
from moetool.caching.residency import Counts, Residency
from moetool.runtime.experts.event_window import EventWindow, WindowForward

_LOG = logging.getLogger(__name__)
_BOUND = "belady"
_LEAST_FORWARDS = 8
_YIELD_EVENTS = 32


@dataclass(frozen=True, kw_only=True)
class OraclePolicies:
    """Policies to compare the server's with, besides LRU and Belady.

    Attributes:
        serving: the server's policy.
        plan: the plan's policy, if another serves; empty without a plan.
    """

    serving: str
    plan: str = ""
    plan_options: Mapping[str, Any] = field(default_factory=dict)


class LiveOracle:
    """Replays the window of a server under LRU, the plan's policy and Belady, on a thread of its own.

    Each starts with an empty pool of the server's size. The first half of the window fills it, and the second half is
    compared, for the server too. Belady knows the window's future only and loads on demand, so it bounds loads, not
    hits: a server that prefetches may have more hits.

    Args:
        every_s: seconds from one comparison to the next, while there are new forwards; 0 never compares.

    Effects: `start` starts the thread, `close` ends it. A comparison takes about 0.1 CPU seconds and yields to the
    model's thread every few events.
    """

    def __init__(
        self, spec: ModelSpec, num_slots: int, window: EventWindow, policies: OraclePolicies, every_s: float
    ) -> None:
        self._spec, self._num_slots, self._window = spec, num_slots, window
        self._policies, self._every_s = policies, every_s
        self._latest: dict[str, Any] | None = None
        self._seen = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def latest(self) -> dict[str, Any] | None:
        """The last comparison as JSON, None before the first."""
        return self._latest

    def start(self) -> None:
        if self._every_s and self._num_slots < self._spec.total_experts:
            self._thread = threading.Thread(target=self._run, name="oracle", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def compare(self) -> dict[str, Any] | None:
        """Replay the window now; None if it is too short."""
        forwards = self._window.forwards()
        if len(forwards) < _LEAST_FORWARDS:
            return None
        began = time.thread_time()
        skipped = len(forwards) // 2
        rest = forwards[skipped:]
        live = sum((forward.counts for forward in rest), Counts())
        names = {"lru": {}, **self._plan(), _BOUND: {}}
        found = {name: _rates(self._replay(name, options, forwards, skipped)) for name, options in names.items()}
        return {
            "forwards": len(rest),
            "events": sum(len(forward.events) for forward in rest),
            "serving": {"policy": self._policies.serving, **_rates(live)},
            **found,
            "processor_seconds": time.thread_time() - began,
        }

    def _plan(self) -> dict[str, Mapping[str, Any]]:
        """The plan's policy, if it differs and needs only the experts of events."""
        name = self._policies.plan
        if name in ("", "lru", self._policies.serving):
            return {}
        kind = policy_class(name)
        plain = kind.lossless and not kind.needs_predictor and not kind.needs_future and kind.needs <= {"experts"}
        return {name: self._policies.plan_options} if plain else {}

    def _replay(self, name: str, options: Mapping[str, Any], forwards: Sequence[WindowForward], skipped: int) -> Counts:
        future = None
        if name == _BOUND:
            key = self._spec.expert_key
            future = [[key(event.layer, e) for e in event.needed] for f in forwards for event in f.events]
        policy = build_policy(name, self._spec, options, self._num_slots, future=future)
        return self._run_window(Residency(policy), forwards, skipped)

    def _run_window(self, residency: Residency, forwards: Sequence[WindowForward], skipped: int) -> Counts:
        before = Counts()
        last_of = {request: number for number, forward in enumerate(forwards) for request in forward.info.request_T}
        for number, forward in enumerate(forwards):
            if number == skipped:
                before = residency.counts
            if forward.reserved_slots != residency.reserved_slots:
                residency.reserve_slots(forward.reserved_slots)
            residency.begin_forward(forward.info)
            for i, event in enumerate(forward.events):
                residency.event(event)
                if i % _YIELD_EVENTS == 0:
                    time.sleep(0)  # the model's thread goes first
            residency.end_forward(forward.info)
            for request in dict.fromkeys(forward.info.request_T):
                if last_of[request] == number:
                    residency.end_request(request)
            if self._closed.is_set():
                break
        return residency.counts - before

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            if self._window.passed == self._seen:
                continue
            self._seen = self._window.passed
            try:
                self._latest = self.compare() or self._latest
            except MoetoolError as error:  # e.g. the pool is too small for the plan's policy
                _LOG.warning("the server's policy is not compared with others: %s", error)
                return
            except ValueError as error:
                _LOG.warning("the server's policy was not compared with others this time: %s", error)
                continue
            if self._latest is not None:
                _LOG.info("hits of the last %d forwards: %s", self._latest["forwards"], format_comparison(self._latest))


def format_comparison(compared: Mapping[str, Any]) -> str:
    """A comparison in a line: hits, and loads per needed expert."""
    rows = {row.get("policy", name): row for name, row in compared.items() if isinstance(row, dict) and "loads" in row}
    return ", ".join(f"{name} {row['hit_rate']:.3f} ({row['loads']:.3f} loads)" for name, row in rows.items())


def _rates(counts: Counts) -> dict[str, float]:
    """Share of hits, and loads per needed expert."""
    return {"hit_rate": counts.hit_rate, "loads": counts.loads / counts.needed if counts.needed else 0.0}
