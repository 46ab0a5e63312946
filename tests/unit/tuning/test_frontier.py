"""Memory against latency: frontiers, and the least memory for a time; against brute force."""

from pathlib import Path
from typing import Any

import pytest

from moetool.base.config import parse_seconds
from moetool.base.errors import CapacityError, UsageError
from moetool.trace.reader import Trace
from moetool.tuning.candidates import Candidates, best, servable, touched_bytes, tpot_s
from moetool.tuning.frontier import budgets_between, least_budget
from moetool.tuning.replay import ReplaySetup, replay, whole_bytes
from tests.plans import choose_cache
from tests.profiles import flat, make_profile
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_spec, write_trace

FIXED = {"dense_bytes": 3_000, "kv_bytes": 500, "pool": "one"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("traces") / "t", make_spec(), num_requests=6)


@pytest.fixture(scope="module")
def slow(trace: Trace) -> Any:
    return make_profile(trace.spec, loads={"disk": flat(100)})


def candidates(trace: Trace, profile: Any = None, predictor: Any = None, **choices: Any) -> Candidates:
    setup = ReplaySetup(profile=profile, predictor=predictor)
    return Candidates(trace, frozenset({0, 2, 4}), frozenset({1, 3, 5}), setup, **choices)


def test_the_least_memory_for_a_time_is_that_of_trying_every_pool(trace: Trace, slow: Any) -> None:
    field = candidates(trace, names=["lru"], profile=slow)
    times = [tpot_s(field.winners([slots * 1_000])[slots * 1_000]) for slots in range(2, 25)]
    assert times == sorted(times, reverse=True)  # what bisection takes for granted; LRU keeps it here
    for target in {*times, (times[3] + times[4]) / 2}:
        expected = next(slots for slots, seconds in enumerate(times, start=2) if seconds <= target)
        for grid in ([], budgets_between(2_000, 24_000, 1_000, 4)):
            fresh = candidates(trace, names=["lru"], profile=slow)
            assert least_budget(fresh, 2_000, 24_000, 1_000, target, grid) == expected * 1_000


def test_a_plan_for_a_time_takes_no_more_memory_than_it_needs(trace: Trace, slow: Any) -> None:
    choices: dict[str, Any] = {**FIXED, "profile": slow, "seed": 1}
    most = choose_cache(trace, 20_500, **choices)
    used = frozenset(most.requests_used)
    fastest = tpot_s(best(candidates(trace, profile=slow).rows([17_000], used)[0]))
    assert fastest is not None
    plan = choose_cache(trace, 20_500, target_tpot_s=fastest * 1.5, **choices)
    assert plan.target_tpot_s == fastest * 1.5
    assert plan.device_memory_bytes == 3_500 + plan.budget_bytes < most.device_memory_bytes
    for slots, meets in ((plan.slots, True), (plan.slots - 1, False)):
        (rows,) = candidates(trace, profile=slow).rows([slots * 1_000], used)
        seconds = tpot_s(best(rows))
        assert seconds is not None
        assert (seconds <= fastest * 1.5) is meets
    (own,) = [row for row in plan.evidence if row["policy"] == plan.policy]
    assert plan.reason.endswith(
        f"on the held-out requests: {'met' if own['tpot_mean_s'] <= fastest * 1.5 else 'missed'}."
    )


def test_a_time_out_of_reach_is_refused_with_the_best(trace: Trace, slow: Any) -> None:
    with refused(CapacityError, "1e-06", "13,500", "10"):
        choose_cache(trace, 13_500, profile=slow, target_tpot_s=1e-9, **FIXED)
    with refused(UsageError, "costs", "machine"):
        choose_cache(trace, 13_500, target_tpot_s=1.0, **FIXED)


def test_what_the_host_computes_from_disk_is_no_candidate_where_its_time_counts(trace: Trace, slow: Any) -> None:
    why = {"static_split": "whose host compute is timed for experts in host memory, not on disk"}
    assert candidates(trace, profile=slow).left_out(23_000) == why
    assert candidates(trace, names=["static_split"], profile=slow).left_out(24_000) == {}


def test_a_time_needs_decoded_tokens(tmp_path: Path, slow: Any) -> None:
    prompts = write_trace(tmp_path / "t", make_spec(), new_tokens=0)
    with refused(UsageError, "decoded", "tokens"):
        choose_cache(prompts, 13_500, profile=slow, target_tpot_s=1.0)


def test_the_frontier_is_the_plans_of_its_budgets(trace: Trace, slow: Any) -> None:
    shown: list[tuple[str, int, int]] = []
    plan = choose_cache(trace, 13_500, profile=slow, frontier=4, on_progress=lambda *now: shown.append(now), **FIXED)
    assert len({title for title, _, _ in shown}) == 1  # one amount for all replays, which never restarts
    done, totals = [now[1] for now in shown], [now[2] for now in shown]
    assert done == sorted(done) and totals == sorted(totals)
    assert 1.1 * totals[0] > totals[-1] == done[-1]
    assert done[-2] > 0.8 * totals[-1]  # the estimate was near
    memory = [point["device_memory_bytes"] for point in plan.frontier]
    assert memory == [5_500, 12_500, 13_500, 19_500, 27_500]
    assert [point["chosen"] for point in plan.frontier].count(True) == 1
    for point in plan.frontier:
        alone = choose_cache(trace, point["device_memory_bytes"], profile=slow, **FIXED)
        (row,) = [row for row in alone.evidence if row["policy"] == alone.policy]
        assert (point["policy"], point["slots"]) == (alone.policy, alone.slots)
        assert point["tpot_held_out_s"] == row["tpot_mean_s"]
        assert point["bytes_held_out"] == row["bytes_per_decode_token"] + row["host_bytes_per_decode_token"]
        assert point["chosen"] is (point["device_memory_bytes"] == 13_500)
    assert choose_cache(trace, 13_500, profile=slow, **FIXED).frontier == ()
    untimed = choose_cache(trace, 13_500, frontier=2, **FIXED)
    assert {point["tpot_used_s"] for point in untimed.frontier} == {None}


def test_a_predictor_is_paid_for_at_every_budget(trace: Trace) -> None:
    predictor = MadeUpPredictor(trace.spec)
    field = candidates(trace, names=["duoserve", "lru"], predictor=predictor, predictor_bytes=3_000)
    small, large = field.rows([4_000, 12_000], field.used)
    assert [row.policy for row in small] == ["lru"]
    assert {row.policy: row.budget_bytes for row in large} == {"lru": 12_000, "duoserve": 9_000}
    assert field.left_out(4_000) == {"duoserve": "whose predictor of 3,000 bytes leaves no room for experts"}
    assert field.paid_bytes == 3_000


def test_budgets_lie_evenly_between_the_smallest_pool_and_all_experts() -> None:
    assert budgets_between(2_000, 24_000, 1_000, 3) == [2_000, 13_000, 24_000]
    assert budgets_between(2_500, 6_000, 1_000, 3) == [2_500, 3_500, 5_500]
    assert budgets_between(2_000, 24_000, 1_000, 1) == [2_000]
    assert budgets_between(2_000, 24_000, 1_000, 0) == []
    assert budgets_between(2_000, 2_000, 1_000, 3) == [2_000]


def test_lru_is_chosen_where_every_expert_has_a_slot(trace: Trace) -> None:
    whole = whole_bytes(trace)
    names = ["static_split", "foresight", "lru", "lfu"]
    chosen = candidates(trace, names=names).winners([whole - 1000, whole, 2 * whole])
    assert chosen[whole].policy == chosen[2 * whole].policy == "lru"
    assert candidates(trace, names=names[:2]).winners([whole])[whole].policy in names[:2]


def test_what_cannot_win_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what loads whatever it needs, by its definition, nor what falls far behind on a sample."""
    monkeypatch.setattr("moetool.tuning.candidates.SAMPLED_TOKENS", 100)
    trace = write_trace(tmp_path / "t", make_spec(), num_requests=30, new_tokens=15)
    used = frozenset(range(0, 30, 2))
    field = Candidates(trace, used, frozenset(range(1, 30, 2)))
    (chosen,) = field.winners([12_000]).values()
    lost = field.left_out(12_000)
    assert {"layerwise", "on_demand"} < lost.keys() and chosen.policy not in lost
    assert "moesys" in field.left_out(23_000)
    with_it, without = (
        replay(trace, [name], [12_000], ReplaySetup(requests=used, pool_unit="slots"))[0]
        for name in ("lru", "on_demand")
    )
    assert touched_bytes(with_it) <= touched_bytes(without)
    slow = {name: why for name, why in lost.items() if "sample" in why}
    for name in slow:
        (row,) = replay(trace, [name], [12_000], ReplaySetup(requests=used, pool_unit="slots"))
        assert touched_bytes(row) > 1.1 * touched_bytes(chosen)
    assert slow and set(field.left_out(24_000)) == set(servable(trace, None)) - {"lru"}


def test_times_are_read_with_their_unit() -> None:
    assert [parse_seconds(text) for text in ("80ms", "0.08 s", "250us")] == pytest.approx([0.08, 0.08, 0.00025])
    for text in ("80", "fast", "0ms", "-1s"):
        with refused(UsageError, "not a duration"):
            parse_seconds(text)
