"""Slots that layers have of their own: how many, who goes for whom, and whether plans choose them."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from moetool.base.errors import CapacityError
from moetool.caching.layer_slots import equal_slots, scaled_down
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.tuning.replay import ReplaySetup, replay
from tests.plans import choose_cache
from tests.refusals import refused
from tests.synthetic import make_spec, random_stream, write_trace

SPEC = make_spec(layers=3, experts=8, top_k=2)


def test_slots_are_dealt_evenly_and_no_layer_has_more_than_experts() -> None:
    assert equal_slots(SPEC, 10) == (4, 3, 3)
    assert equal_slots(SPEC, 24) == (8, 8, 8)
    assert equal_slots(SPEC, 10, 0.5) == (2, 2, 1)
    with refused(CapacityError, "expert", "slots", "2", "3"):
        equal_slots(SPEC, 2)


def test_a_smaller_pool_keeps_the_proportions() -> None:
    assert scaled_down(SPEC, (8, 4, 2), 14) == (8, 4, 2)
    assert scaled_down(SPEC, (8, 4, 2), 7) == (4, 2, 1)


def test_full_layers_keep_to_their_own_slots() -> None:
    """Against an LRU that is written out for each layer."""
    residency = Residency(build_policy("lru", SPEC, {}, 12), layer_slots=(4, 4, 4))
    plain: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(3)]
    compared = 0
    for info, events in random_stream(SPEC, num_requests=3, prompt_tokens=0, new_tokens=40, seed=1):
        residency.begin_forward(info)
        for event in events:
            before = residency.counts.kept
            full = all(len(layer) == 4 for layer in plain)
            residency.event(event)
            own = plain[event.layer]
            needed = sorted(event.needed)
            hits = [expert for expert in needed if expert in own]
            for expert in (*hits, *(expert for expert in needed if expert not in own)):
                own[expert] = None
                own.move_to_end(expert)
                if len(own) > 4:
                    own.popitem(last=False)
            if full and compared > 10:  # what was borrowed at first is given back by then
                assert residency.counts.kept - before == len(hits)
            compared += full
        residency.end_forward(info)
    assert compared > 200
    held = [sum(key // SPEC.num_experts == layer for key in residency.slot_of) for layer in range(3)]
    assert held == [4, 4, 4]


def test_only_layers_beyond_their_slots_and_the_loading_layer_evict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "compiles", False)
    policy, slots = build_policy("foresight", SPEC, {"prefetch": False}, 12), (4, 4, 4)
    residency = Residency(policy, layer_slots=slots)
    choose, layer, checked = policy.evict_among, 0, []

    def checking(candidates: Sequence[int], residents: Collection[int]) -> int:
        held = [sum(key // SPEC.num_experts == layer for key in residents) for layer in range(3)]
        may = {other for other in range(3) if held[other] >= slots[other] + (other != layer)}
        assert {key // SPEC.num_experts for key in candidates} <= may and set(candidates) <= set(residents)
        checked.append(len(may))
        return choose(candidates, residents)

    policy.evict_among = checking  # type: ignore[method-assign]
    for info, events in random_stream(SPEC, num_requests=3, prompt_tokens=6, new_tokens=40, seed=3):
        residency.begin_forward(info)
        for event in events:
            layer = event.layer
            residency.event(event)
        residency.end_forward(info)
    assert {1, 2} <= set(checked)


def test_a_layer_takes_what_no_other_claims() -> None:
    residency = Residency(build_policy("lru", SPEC, {}, 12), layer_slots=(2, 2, 2))
    for info, events in random_stream(SPEC, num_requests=1, prompt_tokens=0, new_tokens=30, seed=2):
        residency.begin_forward(info)
        residency.event(events[0])  # a model of which only the first layer is asked
        residency.end_forward(info)
    assert len(residency.slot_of) == 8


def test_a_plan_gives_layers_their_own_slots_where_one_pool_hits_nothing(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", SPEC, num_requests=6)
    plan = choose_cache(trace, 6_000, policies=["lru"])
    assert len(plan.layer_slots) == 3 and sum(plan.layer_slots) <= plan.slots
    assert "own slots" in plan.reason
    budget = [plan.budget_bytes]
    requests = frozenset(plan.requests_held_out)
    (own,) = replay(trace, ["lru"], budget, ReplaySetup(layer_slots=plan.layer_slots, requests=requests))
    shown = next(row for row in plan.evidence if row["policy"] == "lru")
    assert shown["hit_rate"] == own.counts.hit_rate
    (layer,) = replay(trace, ["lru"], budget, ReplaySetup(pool="layer"))
    (one,) = replay(trace, ["lru"], budget)
    assert layer.counts.hit_rate > one.counts.hit_rate
