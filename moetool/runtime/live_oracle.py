"""What other policies would have hit on a server's own last events: whether its policy is worth it, while it runs."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.caching._policy import build_policy, policy_class
from moetool.caching._residency import Counts, Residency
from moetool.errors import MoetoolError
from moetool.runtime.event_window import EventWindow, WindowForward
from moetool.types import ModelSpec

_LOG = logging.getLogger(__name__)
_BOUND = "belady"
_LEAST_FORWARDS = 8
_YIELD_EVENTS = 32


@dataclass(frozen=True, kw_only=True)
class OraclePolicies:
    """What a server's policy is compared with, besides LRU and Belady.

    Attributes:
        serving: the policy that serves.
        plan: the plan's, where another serves; empty without a plan.
        plan_options: of the plan's.
    """

    serving: str
    plan: str = ""
    plan_options: Mapping[str, Any] = field(default_factory=dict)


class LiveOracle:
    """Replays the window of a server under LRU, the plan's policy and Belady, on a thread of its own.

    Each begins with an empty pool as large as the server's. The first half of the window fills it, and the second half
    is compared, for the server as for the others. Belady knows the window's future and no more, loads on demand alone
    and so bounds loads, not hits: a server that prefetches may have more.

    Args:
        every_s: seconds from one comparison to the next, while there are new forwards; 0 never compares.

    Effects: `start` starts the thread, `close` ends it. A comparison takes about 0.1 s of a processor and yields to the
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
        """Compare from now on."""
        if self._every_s and self._num_slots < self._spec.total_experts:
            self._thread = threading.Thread(target=self._run, name="oracle", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def compare(self) -> dict[str, Any] | None:
        """Replay the window now; None while it is too short."""
        forwards = self._window.forwards()
        if len(forwards) < _LEAST_FORWARDS:
            return None
        began = time.thread_time()
        rest = forwards[len(forwards) // 2 :]
        live = sum((forward.counts for forward in rest), Counts())
        names = {"lru": {}, **self._plan(), _BOUND: {}}
        skipped = len(forwards) - len(rest)
        found = {name: self._replay(name, options, forwards, skipped) for name, options in names.items()}
        return {
            "forwards": len(rest),
            "events": sum(len(forward.events) for forward in rest),
            "serving": {"policy": self._policies.serving, **_rates(live)},
            **{name: _rates(counts) for name, counts in found.items()},
            "processor_seconds": time.thread_time() - began,
        }

    def _plan(self) -> dict[str, Mapping[str, Any]]:
        """The plan's policy, if it is another one that needs no more than the experts of events."""
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
        residency = Residency(build_policy(name, self._spec, options, self._num_slots, future=future))
        before = Counts()
        for number, forward in enumerate(forwards):
            if number == skipped:
                before = residency.counts
            residency.begin_forward(forward.info)
            for i, event in enumerate(forward.events):
                residency.event(event)
                if i % _YIELD_EVENTS == 0:
                    time.sleep(0)  # the model's thread goes first
            residency.end_forward(forward.info)
        return residency.counts - before

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            if self._window.passed == self._seen:
                continue
            self._seen = self._window.passed
            try:
                self._latest = self.compare() or self._latest
            except MoetoolError as error:  # a plan whose policy this pool is too small for, say
                _LOG.warning("the server's policy is not compared with others: %s", error)
                return
            if self._latest is not None:
                _LOG.info("hits of the last %d forwards: %s", self._latest["forwards"], spelled(self._latest))


def spelled(compared: Mapping[str, Any]) -> str:
    """A comparison in a line: hits, and loads for each needed expert."""
    rows = {row.get("policy", name): row for name, row in compared.items() if isinstance(row, dict)}
    return ", ".join(f"{name} {row['hit_rate']:.3f} ({row['loads']:.3f} loads)" for name, row in rows.items())


def _rates(counts: Counts) -> dict[str, float]:
    """Share of hits, and loads for each needed expert."""
    return {"hit_rate": counts.hit_rate, "loads": counts.loads / counts.needed if counts.needed else 0.0}
