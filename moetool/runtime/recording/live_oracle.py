"""Replay a running server's recent events under other policies, to compare them with its own.

If the server may change its policy, candidates are replayed too, and one that loads clearly less takes over.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.policy import build_policy, policy_class
from moetool.caching.policy_changes import PolicyChanges, PolicyChoice
from moetool.caching.residency import Counts, Residency
from moetool.runtime.experts.event_window import EventWindow, WindowForward

_LOG = logging.getLogger(__name__)
_BOUND = "belady"
_LEAST_FORWARDS = 8
_YIELD_EVENTS = 32
CANDIDATES = (
    PolicyChoice("lru", "layer"),
    PolicyChoice("lfu", "layer"),
    PolicyChoice("foresight", "layer"),
    PolicyChoice("foresight"),
    PolicyChoice("lfru", "layer"),
    PolicyChoice("lfu"),
)
"""Policies without a predictor that loaded the fewest experts on some trace of `moetool bench policies`."""
_LEAST_COMPARED = 32
"""Fewest forwards in the second half of a window for a policy change."""
_CLEARLY = 0.9
"""Largest ratio of a candidate's loads to the server's for a change: the margin covers the error of an empty pool."""
_LEAST_GAIN = 0.01
"""Fewest loads per needed expert that a change must save."""
_TIMES = 2
"""Consecutive comparisons that a candidate must win, each with at least half of its forwards new."""
_TOGETHER_S = 1.0
_ALONE_S = 2.0
"""CPU seconds after which a comparison starts no further candidate, and after which it aborts one."""


@dataclass(frozen=True, kw_only=True)
class OraclePolicies:
    """Policies to compare the server's with, besides LRU and Belady.

    Attributes:
        serving: the server's first policy.
        plan: the plan's policy, if another serves; empty without a plan.
        plan_options: options of the plan's policy.
        candidates: policies that may take over; empty if the server keeps its policy.
    """

    serving: str
    plan: str = ""
    plan_options: Mapping[str, Any] = field(default_factory=dict)
    candidates: Sequence[PolicyChoice] = ()


class LiveOracle:
    """Replays the window of a server under LRU, the plan's policy and Belady, on a thread of its own.

    Each starts with an empty pool of the server's size. The first half of the window fills it, and the second half is
    compared, for the server too. Belady knows the window's future only and loads on demand, so it bounds loads, not
    hits: a server that prefetches may have more hits.

    Args:
        every_s: seconds from one comparison to the next, while there are new forwards; 0 never compares.
        on_choice: called on the oracle's thread with a winning candidate; returns whether it takes over. No further
            change follows until the window holds only forwards of the new policy.
        changes: the policy in force, and how to build candidates; None: the policy never changes.

    Effects: `start` starts the thread, `close` ends it. A comparison takes about 0.1 CPU seconds, with candidates up to
    3, and yields to the model's thread every few events.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        window: EventWindow,
        policies: OraclePolicies,
        every_s: float,
        *,
        on_choice: Callable[[PolicyChoice], bool] = lambda choice: False,
        changes: PolicyChanges | None = None,
    ) -> None:
        self._spec, self._num_slots, self._window = spec, num_slots, window
        self._policies, self._every_s = policies, every_s
        self._on_choice, self._changes = on_choice, changes
        self._serving = policies.serving
        self._turn = 0  # index of the next candidate
        self._wins: Counter[PolicyChoice] = Counter()
        self._counted: dict[PolicyChoice, int] = {}  # forward count when it last won
        self._changed = 0  # forward count at the last change
        self._latest: dict[str, Any] | None = None
        self._seen = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def latest(self) -> dict[str, Any] | None:
        """The last comparison as JSON, None before the first."""
        return self._latest

    def start(self) -> None:
        """Start the thread."""
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
        if self._changes is not None:
            self._serving = self._changes.current.name
        forwards, passed = self._window.forwards(), self._window.passed
        if len(forwards) < _LEAST_FORWARDS:
            return None
        began = time.thread_time()
        skipped = len(forwards) // 2
        rest = forwards[skipped:]
        live = sum((forward.counts for forward in rest), Counts())
        names = {"lru": {}, **self._plan(), _BOUND: {}}
        found = {name: _rates(self._replay(name, options, forwards, skipped)) for name, options in names.items()}
        serving = {"policy": self._serving, **_rates(live)}
        tried: dict[PolicyChoice, dict[str, float]] = {}
        if self._policies.candidates and passed - len(forwards) >= self._changed:
            tried = self._try(forwards, skipped, began)
            if self._serving != "lru":
                tried[PolicyChoice("lru")] = found["lru"]
            self._consider(tried, serving["loads"], len(rest), passed)
        return {
            "forwards": len(rest),
            "events": sum(len(forward.events) for forward in rest),
            "serving": serving,
            **found,
            **({"candidates": {choice.name: rates for choice, rates in tried.items()}} if tried else {}),
            "processor_seconds": time.thread_time() - began,
        }

    def _try(
        self, forwards: Sequence[WindowForward], skipped: int, began: float
    ) -> dict[PolicyChoice, dict[str, float]]:
        """Replay candidates within the time limit, from where the last comparison ended; always the first."""
        tried: dict[PolicyChoice, dict[str, float]] = {}
        for _ in self._policies.candidates:
            choice = self._policies.candidates[self._turn % len(self._policies.candidates)]
            self._turn += 1
            if choice.name == self._serving:
                continue
            try:
                counts = self._replay_choice(choice, forwards, skipped)
            except MoetoolError:  # it needs more slots, or numba is missing
                continue
            if counts is not None:
                tried[choice] = _rates(counts)
            if time.thread_time() - began > _TOGETHER_S:
                break
        return tried

    def _consider(
        self, tried: Mapping[PolicyChoice, Mapping[str, float]], loads: Any, compared: int, passed: int
    ) -> None:
        """Count wins, and switch to the best candidate with enough of them."""
        if compared < _LEAST_COMPARED:
            return
        for choice, rates in tried.items():
            if rates["loads"] > min(_CLEARLY * loads, loads - _LEAST_GAIN):
                self._wins[choice] = 0
            elif passed - self._counted.get(choice, passed - compared) >= compared // 2:
                self._wins[choice] += 1
                self._counted[choice] = passed
        ready = [choice for choice in tried if self._wins[choice] >= _TIMES]
        if not ready:
            return
        best = min(ready, key=lambda choice: tried[choice]["loads"])
        if self._on_choice(best):
            _LOG.info(
                "%s takes over from %s: %.3f loads per needed expert over the last %d forwards, instead of %.3f",
                *(best.name, self._serving, tried[best]["loads"], compared, loads),
            )
            self._changed = self._window.passed + 1  # a forward may be running
            self._wins.clear()
            self._counted.clear()

    def _plan(self) -> dict[str, Mapping[str, Any]]:
        """The plan's policy, if it differs and needs only the experts of events."""
        name = self._policies.plan
        if name in ("", "lru", self._serving):
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
        counts = self._run_window(Residency(policy), forwards, skipped)
        assert counts is not None
        return counts

    def _replay_choice(self, choice: PolicyChoice, forwards: Sequence[WindowForward], skipped: int) -> Counts | None:
        """Replay a candidate; None if it takes too long."""
        assert self._changes is not None, "candidates need a policy that may change"
        options = self._changes.options_of(choice.policy)
        policy = build_policy(choice.policy, self._spec, options, self._num_slots)
        if state := self._changes.learned(choice.policy):
            policy.restore({name: array.copy() for name, array in state.items()})
        residency = Residency(policy, layer_slots=choice.layer_slots(self._spec, self._num_slots))
        return self._run_window(residency, forwards, skipped, _ALONE_S)

    def _run_window(
        self, residency: Residency, forwards: Sequence[WindowForward], skipped: int, most_s: float = float("inf")
    ) -> Counts | None:
        began, before = time.thread_time(), Counts()
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
            if time.thread_time() - began > most_s or self._closed.is_set():
                return None if most_s < float("inf") else residency.counts - before
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
            except ValueError as error:  # e.g. of one candidate; the next comparison starts with another
                _LOG.warning("the server's policy was not compared with others this time: %s", error)
                continue
            if self._latest is not None:
                _LOG.info("hits of the last %d forwards: %s", self._latest["forwards"], format_comparison(self._latest))


def format_comparison(compared: Mapping[str, Any]) -> str:
    """A comparison in a line: hits, and loads per needed expert."""
    found = {**compared, **compared.get("candidates", {})}
    rows = {row.get("policy", name): row for name, row in found.items() if isinstance(row, dict) and "loads" in row}
    return ", ".join(f"{name} {row['hit_rate']:.3f} ({row['loads']:.3f} loads)" for name, row in rows.items())


def _rates(counts: Counts) -> dict[str, float]:
    """Share of hits, and loads per needed expert."""
    return {"hit_rate": counts.hit_rate, "loads": counts.loads / counts.needed if counts.needed else 0.0}
