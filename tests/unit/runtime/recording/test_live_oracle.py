"""Replays of a server's last events under other policies."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policy import build_policy
from moetool.caching.policy_changes import PolicyChanges, PolicyChoice
from moetool.caching.residency import Counts, Residency
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.experts.event_window import EventWindow
from moetool.runtime.recording.live_oracle import LiveOracle, OraclePolicies, format_comparison
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests.synthetic import make_forward, make_spec, random_stream, run_forwards

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


def _cycle(spec: ModelSpec, num_forwards: int) -> list[tuple[ForwardInfo, list[GateEvent]]]:
    """A stream that goes round more experts than the pool has slots, the same ones in each forward."""
    return [
        make_forward(spec, np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]]), forward_id=number)
        for number in range(num_forwards)
    ]


def test_a_policy_that_loads_clearly_less_twice_takes_over_and_no_sooner() -> None:
    spec = make_spec(layers=4, experts=8, top_k=2)
    window, chosen = EventWindow(most_events=400), list[PolicyChoice]()
    residency = Residency(build_policy("lru", spec, {}, 6))  # of 8 that a forward needs: nothing is hit
    changes = PolicyChanges(residency, PolicyChoice("lru"), {})

    def on_choice(choice: PolicyChoice) -> bool:
        chosen.append(choice)
        changes.change(choice)
        return True

    candidates = (PolicyChoice("lru", "layer"), PolicyChoice("lfu", "layer"))
    policies = OraclePolicies(serving="lru", candidates=candidates)
    oracle = LiveOracle(spec, 6, window, policies, 0.0, on_choice=on_choice, changes=changes)
    stream = _cycle(spec, 500)
    hits: list[float] = []
    for number, (info, events) in enumerate(stream):
        before = residency.counts
        window.begin(before)
        residency.begin_forward(info)
        for event in events:
            residency.event(event)
            window.add(event)
        residency.end_forward(info)
        window.end(info, residency.counts)
        hits.append((residency.counts - before).hit_rate)
        if number in (40, 100, 105, 200, 480):
            found = oracle.compare()
            assert found is not None
            if number in (40, 105):  # too few forwards, and few new ones
                assert not chosen
            if number == 100:
                assert "lfu by layer 0." in format_comparison(found)
                assert found["serving"]["hit_rate"] == 0 and found["candidates"]["lru by layer"]["hit_rate"] > 0.4
    assert chosen == [PolicyChoice("lru", "layer")]
    assert max(hits[:200]) == 0 and min(hits[210:]) > 0.4
    assert found["serving"]["policy"] == "lru by layer" and "lru by layer" not in found["candidates"]


def test_a_policy_that_comes_back_knows_what_it_had_learned() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    residency = Residency(build_policy("lfu", spec, {}, SLOTS))
    changes = PolicyChanges(residency, PolicyChoice("lfu"), {})
    for number, (info, events) in enumerate(
        random_stream(spec, num_requests=1, prompt_tokens=4, new_tokens=30, seed=4)
    ):
        if number in (10, 20):
            before = changes.state()
            changes.change(PolicyChoice("foresight", "layer") if number == 10 else PolicyChoice("lfu"))
            assert all(np.array_equal(array, changes.state()[name]) for name, array in before.items())
            assert set(residency.slot_of) and residency.policy.num_slots == SLOTS
            assert bool(changes.learned("lfu")) == (number == 10) and not changes.learned(changes.current.policy)
        run_forwards(residency, [(info, events)])
    assert changes.learned("foresight") and len(changes.state()["uses_N3"])


def test_a_candidate_is_built_with_the_options_that_it_would_serve_with() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window, options = EventWindow(), {"memory": 16, "neighbours": 2}
    residency = Residency(build_policy("foresight", spec, options, SLOTS))
    changes = PolicyChanges(residency, PolicyChoice("foresight"), options)
    changes.change(PolicyChoice("lru"))
    _served(spec, "lru", window)
    policies = OraclePolicies(serving="foresight", candidates=[PolicyChoice("foresight", "layer")])
    found = LiveOracle(spec, SLOTS, window, policies, 0.0, changes=changes).compare()
    assert found is not None and found["serving"]["policy"] == "lru"
    assert "foresight by layer" in found["candidates"]


def test_a_candidate_that_did_not_take_over_is_not_said_to_serve_and_is_tried_again() -> None:
    spec = make_spec(layers=4, experts=8, top_k=2)
    window, chosen = EventWindow(most_events=400), list[PolicyChoice]()
    residency = Residency(build_policy("lru", spec, {}, 6))
    changes = PolicyChanges(residency, PolicyChoice("lru"), {})

    def on_choice(choice: PolicyChoice) -> bool:
        chosen.append(choice)
        return True

    policies = OraclePolicies(serving="lru", candidates=[PolicyChoice("lru", "layer")])
    oracle = LiveOracle(spec, 6, window, policies, 0.0, on_choice=on_choice, changes=changes)
    stream = _cycle(spec, 500)
    for first in range(0, 500, 100):
        _drive(residency, window, stream[first : first + 100])
        found = oracle.compare()
        assert found is not None and found["serving"]["policy"] == "lru"
    assert len(chosen) == 2


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


def test_a_change_that_fails_leaves_the_server_and_its_policy(
    reference: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServeOptions(oracle_s=0.0, kv_tokens=512, change_policy=True)
    engine = build_engine(Checkpoint.open(reference), options=options, policy="lfu", device_memory_bytes=33_000_000)
    engine.state = "ready"

    def fails(self: object, choice: PolicyChoice) -> None:
        raise ValueError("a state of another shape")

    monkeypatch.setattr(PolicyChanges, "change", fails)
    assert engine.change_policy(PolicyChoice("lru"))
    finished: list[str | None] = []
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.submit(list(range(5, 25)), params, lambda output: finished.append(output.finish))
    while not engine.idle:
        engine.step()
    engine.close()
    assert finished[-1] == "length" and "lru does not take over: a state of another shape" in caplog.text


def test_a_kept_state_that_does_not_fit_costs_no_other_policy_its_own(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(layers=2, experts=8)
    changes = PolicyChanges(Residency(build_policy("lru", spec, {}, 8)), PolicyChoice("lru"), {})
    uses = np.array([[3, 5, 1]])
    changes.restore_states({"foresight": {"odd": np.zeros(3)}, "lfu": {"uses_N3": uses}})
    assert "foresight starts without its kept state" in caplog.text
    assert changes.learned("foresight") == {} and np.array_equal(changes.learned("lfu")["uses_N3"], uses)


def test_replays_lend_the_slots_that_the_server_lent() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    window, residency = EventWindow(), Residency(build_policy("lru", spec, {}, SLOTS))
    stream = list(random_stream(spec, num_requests=3, prompt_tokens=4, new_tokens=30, seed=2))
    _drive(residency, window, stream, lambda number: 4 if number % 3 == 0 else 0)
    found = _oracle(spec, window, "lru").compare()
    assert found is not None and found["lru"]["loads"] == found["serving"]["loads"]
