"""Replays of a server's last events under other policies."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policy import build_policy
from moetool.caching.residency import Counts, Residency
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.experts.event_window import EventWindow
from moetool.runtime.recording.live_oracle import LiveOracle, OraclePolicies, format_comparison
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests.synthetic import make_spec, random_stream, run_forwards

SLOTS = 9


def _served(spec: ModelSpec, policy: str, window: EventWindow) -> list[tuple[ForwardInfo, Sequence[GateEvent]]]:
    """Run a policy over random routes, as a server does."""
    stream = list(random_stream(spec, num_requests=3, prompt_tokens=4, new_tokens=30, seed=2))
    _drive(Residency(build_policy(policy, spec, {}, SLOTS)), window, stream)
    return stream


def _drive(
    residency: Residency,
    window: EventWindow,
    stream: Sequence[tuple[ForwardInfo, Sequence[GateEvent]]],
    lend: Callable[[int], int] = lambda number: 0,
) -> None:
    for number, (info, events) in enumerate(stream):
        residency.reserve_slots(lend(number))
        window.begin(residency.counts)
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
            window.add(event)
        residency.end_forward(info)
        window.end(info, residency.counts, residency.reserved_slots)


def _oracle(spec: ModelSpec, window: EventWindow, serving: str, every_s: float = 0.0, **plan: Any) -> LiveOracle:
    return LiveOracle(spec, SLOTS, window, OraclePolicies(serving=serving, **plan), every_s)


def test_the_second_half_is_compared_after_the_first_has_filled_the_pool() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window = EventWindow()
    stream = _served(spec, "lfu", window)
    found = _oracle(spec, window, "lfu", plan="lfru").compare()
    assert found is not None and found["forwards"] == -(-len(stream) // 2)
    by_hand = {}
    for name in ("lru", "lfru", "lfu"):
        residency, before = Residency(build_policy(name, spec, {}, SLOTS)), Counts()
        for number, (info, events) in enumerate(stream):
            before = residency.counts if number == len(stream) // 2 else before
            run_forwards(residency, [(info, events)])
        by_hand[name] = (residency.counts - before).hit_rate
    assert found["lru"]["hit_rate"] == by_hand["lru"] and found["lfru"]["hit_rate"] == by_hand["lfru"]
    assert found["serving"] == {"policy": "lfu", "hit_rate": by_hand["lfu"], "loads": 1 - by_hand["lfu"]}
    assert found["belady"]["loads"] < min(found[name]["loads"] for name in ("lru", "lfru", "serving"))
    assert f"lfu {by_hand['lfu']:.3f} (" in format_comparison(found) and "belady" in format_comparison(found)


def test_a_plan_that_needs_more_than_experts_is_left_out() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window = EventWindow()
    _served(spec, "lfu", window)
    for plan in ("hybrimoe", "promoe", "smoe", "lfu", ""):
        found = _oracle(spec, window, "lfu", plan=plan).compare()
        assert found is not None and set(found) == {
            "forwards",
            "events",
            "serving",
            "lru",
            "belady",
            "processor_seconds",
        }


def test_the_window_is_bounded_and_keeps_whole_forwards() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window = EventWindow(most_events=50)
    stream = _served(spec, "lru", window)
    kept = window.forwards()
    assert len(kept) == 16 and window.passed == len(stream)
    assert [forward.info.forward_id for forward in kept] == [info.forward_id for info, _ in stream[-16:]]
    assert all(len(forward.events) == 3 for forward in kept)
    rows = EventWindow(most_rows=12)
    _served(spec, "lru", rows)
    assert sum(len(f.events) * len(f.info.request_T) for f in rows.forwards()) <= 12
    assert _oracle(spec, EventWindow(), "lru").compare() is None


def test_it_compares_on_a_thread_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window = EventWindow()
    _served(spec, "lfu", window)
    oracle = _oracle(spec, window, "lfu", every_s=0.01)
    with caplog.at_level(logging.INFO, logger="moetool.runtime.recording.live_oracle"):
        oracle.start()
        deadline = time.monotonic() + 20
        while oracle.latest is None and time.monotonic() < deadline:
            time.sleep(0.01)
        oracle.close()
    assert oracle.latest is not None and oracle.latest["belady"]["hit_rate"] > 0
    assert [record for record in caplog.records if "hits of the last" in record.getMessage()]


def test_a_servers_window_is_what_it_served(reference: Path) -> None:
    options = ServeOptions(oracle_s=0.0, kv_tokens=512)
    engine = build_engine(Checkpoint.open(reference), options=options, policy="lfu", device_memory_bytes=33_000_000)
    engine.state = "ready"
    engine.submit(list(range(5, 25)), SamplingParams(max_tokens=12, ignore_eos=True), lambda output: None)
    while not engine.idle:
        engine.step()
    window, counts = engine.runtime.window.forwards(), engine.residency.counts
    assert engine.stats()["oracle"] is None
    engine.close()
    assert len(window) == 12 and all(len(forward.events) == engine.spec.num_layers for forward in window)
    assert sum((forward.counts for forward in window), Counts()) == counts
    found = LiveOracle(engine.spec, engine.store.num_slots, engine.runtime.window, OraclePolicies(serving="lfu"), 0.0)
    assert (compared := found.compare()) is not None and compared["belady"]["loads"] <= compared["serving"]["loads"]


def test_the_thread_goes_on_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window, compared = EventWindow(), list[int]()
    _served(spec, "lfu", window)
    oracle = _oracle(spec, window, "lfu", every_s=0.01)
    compare = oracle.compare

    def fails_first() -> dict[str, Any] | None:
        compared.append(window.passed)
        if len(compared) == 1:
            raise ValueError("a state of another shape")
        return compare()

    monkeypatch.setattr(oracle, "compare", fails_first)
    oracle.start()
    deadline = time.monotonic() + 20
    while oracle.latest is None and time.monotonic() < deadline:
        if len(compared) == 1:
            _served(spec, "lfu", window)
        time.sleep(0.01)
    oracle.close()
    assert oracle.latest is not None and "a state of another shape" in caplog.text


def test_replays_lend_the_slots_that_the_server_lent() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window, residency = EventWindow(), Residency(build_policy("lru", spec, {}, SLOTS))
    stream = list(random_stream(spec, num_requests=3, prompt_tokens=4, new_tokens=30, seed=2))
    _drive(residency, window, stream, lambda number: 4 if number % 3 == 0 else 0)
    found = _oracle(spec, window, "lru").compare()
    assert found is not None and found["lru"]["loads"] == found["serving"]["loads"]
