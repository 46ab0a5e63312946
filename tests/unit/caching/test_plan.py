"""Cache plans: made from a trace, saved, loaded, refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.tables import count
from moetool.caching.plan import CachePlan, PredictorReference
from moetool.costing.pricing import TimelineOptions
from moetool.trace.reader import Trace
from moetool.tuning.candidates import servable
from predictors import next_use
from tests import traces
from tests.artefacts import CACHE_PLAN
from tests.plans import choose_cache
from tests.profiles import compute, flat, line, make_profile
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_spec, write_trace

CANDIDATES = {
    *("foresight", "layerwise", "lfru", "lfu", "lru", "moe_infinity", "moesys", "on_demand"),
    "static_split",
}
"""Policies that keep the model's text and need no predictor."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("traces") / "t", make_spec(), num_requests=6)


def test_the_cheapest_on_some_requests_is_shown_on_others(trace: Trace) -> None:
    plan = choose_cache(trace, 13_500, dense_bytes=3_000, kv_bytes=500, trained_on=[0, 3])
    assert plan.budget_bytes == 10_000
    assert plan.slots == 10
    assert sorted((*plan.requests_used, *plan.requests_held_out)) == [1, 2, 4, 5]
    moved = {row["policy"]: row["bytes_per_decode_token"] for row in plan.evidence}
    assert set(moved) == {*CANDIDATES, "belady"} - {"layerwise", "moesys", "on_demand"}
    assert moved[plan.policy] <= moved["moe_infinity"]
    why = "(left out: moesys, which needs 16 slots; layerwise, on_demand, where every needed expert is loaded anew)"
    assert why in plan.reason
    assert f"moves {count(moved[plan.policy], 'B')} at" in plan.reason
    assert f"moves {count(moved['belady'], 'B')} (" in plan.reason
    assert "\n" not in plan.reason
    plan.check(trace.spec)


def test_the_split_follows_from_the_seed(trace: Trace) -> None:
    plans = [choose_cache(trace, 10_000, seed=seed) for seed in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0].requests_used != plans[2].requests_used


def test_candidates_are_those_that_can_serve(trace: Trace) -> None:
    assert set(servable(trace, None)) == CANDIDATES
    assert set(servable(trace, MadeUpPredictor(trace.spec))) == CANDIDATES | {"duoserve", "promoe"}


def test_with_a_profile_the_fastest_is_chosen_and_the_evidence_is_timed(trace: Trace) -> None:
    choices = {"policies": ["on_demand", "layerwise", "lru"], "seed": 1}
    by_bytes = choose_cache(trace, 16_000, **choices)
    assert by_bytes.profile_sha256 is None
    profile = make_profile(trace.spec, loads={"disk": flat(100)})
    timed = choose_cache(trace, 16_000, profile=profile, **choices)
    assert timed.profile_sha256 == profile.sha256 != make_profile(trace.spec).sha256
    times = {row["policy"]: row["tpot_mean_s"] for row in timed.evidence}
    assert set(times) == {"on_demand", "layerwise", "lru", "belady"}
    assert times["lru"] < times["on_demand"] < times["layerwise"]
    assert timed.policy == "lru"
    assert "lru had the shortest time per output token" in timed.reason
    assert f"it takes {times['lru'] * 1e3:,.2f} ms" in timed.reason
    with refused(MismatchError, "profile"):
        choose_cache(trace, 16_000, profile=make_profile(make_spec(experts=9)))


def test_the_fastest_need_not_move_the_fewest_bytes(trace: Trace) -> None:
    """Prefetches that cost nothing on a machine whose dense layers take longer than a whole layer's loads."""
    choices = {"policies": ["on_demand", "moesys"], "seed": 1}
    assert choose_cache(trace, 16_000, **choices).policy == "on_demand"
    profile = make_profile(trace.spec, compute(attention=flat(1000), expert=line(3)), loads={"disk": flat(10)})
    assert choose_cache(trace, 16_000, profile=profile, **choices).policy == "moesys"


def test_a_policy_that_needs_more_slots_is_refused_when_asked_for(trace: Trace) -> None:
    with refused(CapacityError, "moesys", 16, 10):
        choose_cache(trace, 10_000, policies=["lru", "moesys"])
    plan = choose_cache(trace, 16_000, policies=["moesys"])
    assert (plan.slots, plan.prefetch_distance) == (16, 1)
    assert "left out" not in plan.reason


def test_the_plan_says_the_distance_that_was_chosen(trace: Trace) -> None:
    plan = choose_cache(trace, 10_000, policies=["moe_infinity"], options={"moe_infinity": {"distance": 1}})
    assert plan.prefetch_distance == 1


def test_a_plan_comes_back_as_it_was_saved_even_when_its_folder_has_moved(trace: Trace, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    plan = choose_cache(
        trace,
        10_000,
        predictor=MadeUpPredictor(trace.spec),
        reference=PredictorReference(name="made_up", sha256="0" * 64, path=str(old / "predictor")),
        policies=["duoserve"],
        options={"duoserve": {"slots_per_layer": 2}},
    )
    assert (plan.slots, plan.prefetch_distance, plan.options) == (6, 1, {"slots_per_layer": 2})
    plan.save(old / "plan.json")
    assert CachePlan.load(old / "plan.json") == plan
    old.rename(new)
    moved = CachePlan.load(new / "plan.json")
    assert moved.predictor is not None
    assert moved.predictor.path == str(new / "predictor")


def test_what_does_not_fit_is_refused_with_the_numbers(trace: Trace) -> None:
    with refused(CapacityError, "5,000", 1):
        choose_cache(trace, 5_000, dense_bytes=3_000, kv_bytes=300)
    with refused(UsageError, 1):
        choose_cache(trace, 10_000, trained_on=range(5))


def test_foreign_and_damaged_plans_are_refused_in_one_line(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = choose_cache(trace, 10_000)
    plan.save(path)
    values = json.loads(path.read_text())

    def refuses(text: str, *facts: object) -> None:
        path.write_text(text)
        with refused(MismatchError, path, *facts):
            CachePlan.load(path)

    refuses("{")
    refuses("[]", "JSON object")
    refuses("{}", None, "cache_plan", 1)
    refuses(json.dumps({**values, "schema_version": 9}), 9, 1)
    refuses(json.dumps({**values, "slots": "many"}), "slots", "integer")
    refuses(json.dumps({**values, "colour": 1}), "colour")
    values.pop("policy")
    refuses(json.dumps(values), "policy")
    with refused(UsageError, "no plan"):
        CachePlan.load(tmp_path / "absent.json")
    other = replace(make_spec(layers=5), name="other")
    with refused(MismatchError, "synthetic", "other"):
        plan.check(other)


def test_a_predictor_that_leaves_no_room_is_said(trace: Trace) -> None:
    predictor = MadeUpPredictor(trace.spec)
    plan = choose_cache(trace, 10_000, predictor=predictor, predictor_bytes=9_000)
    assert "left out: duoserve, promoe, whose predictor of 9,000 bytes leaves no room" in plan.reason
    assert "duoserve" not in {row["policy"] for row in plan.evidence}


def test_a_predictor_whose_bytes_are_worth_more_as_slots_is_left_out(trace: Trace) -> None:
    predictor = next_use.Predictor(trace.spec, next_use.Options())
    costly = choose_cache(trace, 13_000, predictor=predictor, predictor_bytes=9_000, policies=["foresight"])
    alone = choose_cache(trace, 13_000, policies=["foresight"])
    assert (costly.slots, costly.predictor_bytes, costly.predictor) == (alone.slots, 0, None) == (13, 0, None)
    assert costly.evidence == alone.evidence
    assert "left out: the predictor, which saves less than its 9,000 bytes do as expert slots" in costly.reason


def test_a_profile_prices_host_and_link_for_policies_that_weigh_them(tmp_path: Path) -> None:
    lengths = [(3, 4), (2, 3), (3, 3)]
    made = traces.write(tmp_path / "scored", traces.alone(lengths), lengths)
    costs = [compute(device="cuda"), compute(expert=line(5))]
    profile = make_profile(made.spec, *costs, loads={"disk": flat(10), "pinned": flat(10)})
    machine = TimelineOptions(device="cuda", tier="pinned")
    plan = choose_cache(made, 1_000, policies=["hybrimoe"], profile=profile, timeline=machine)
    assert plan.options == {"load_s": 1e-8, "host_s": 5e-9, "host_token_s": 5e-9}
    assert sum(int(row["hosted"]) for row in plan.evidence if row["policy"] == "hybrimoe")
    given = {"hybrimoe": {"load_s": 1.0, "host_s": 9.0}}
    plan = choose_cache(made, 1_000, policies=["hybrimoe"], profile=profile, timeline=machine, options=given)
    assert plan.options == given["hybrimoe"]
    plan = choose_cache(made, 1_000, policies=["hybrimoe"], profile=profile)  # one processor: it is its own host
    assert plan.options == {}


def test_a_plan_of_an_earlier_version_is_read_unless_it_pins_experts(tmp_path: Path) -> None:
    file, made = tmp_path / "plan.json", CACHE_PLAN()
    file.write_text(json.dumps(made))
    plan = CachePlan.load(file)
    file.write_text(json.dumps({**made, "pinned": [], "limits": None}))
    assert CachePlan.load(file) == plan
    for former in ({"pinned": [[0, 1]]}, {"limits": {"min_recall": 0.5}}):
        file.write_text(json.dumps({**made, **former}))
        with refused(MismatchError, *former, "moetool plan cache"):
            CachePlan.load(file)
