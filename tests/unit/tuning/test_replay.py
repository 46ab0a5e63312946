"""Replay: rows, orders of the forwards, digests and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.caching.compiled_events import CompiledEvents
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.machine_split import SplitCosts
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency, StepKind
from moetool.costing.pricing import TimelineOptions
from moetool.trace.reader import Trace
from moetool.tuning.replay import AS_RECORDED, ReplaySetup, decisions, replay, whole_bytes
from tests.profiles import compute, flat, make_profile
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_spec, run_forwards, write_trace

ALL = ["on_demand", "lru", "lfu", "duoserve", "belady"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    spec = make_spec(layers=3, experts=8, top_k=2, expert_bytes=(1000, 800, 600))
    return write_trace(tmp_path_factory.mktemp("traces") / "t", spec, num_requests=4, new_tokens=6)


def test_rows_come_by_policy_and_budget_and_add_up(trace: Trace) -> None:
    rows = replay(trace, ALL, [4000, 16000], ReplaySetup(predictor=MadeUpPredictor(trace.spec)))
    assert [(row.policy, row.budget_bytes) for row in rows] == [(p, b) for p in ALL for b in (4000, 16000)]
    assert [row.slots for row in rows if row.policy == "lru"] == [4, 16]
    assert len({row.counts.needed for row in rows}) == 1
    for row in rows:
        assert row.decode_tokens == 4 * 6
        assert 600 * row.counts.loads <= row.loaded_bytes <= 1000 * row.counts.loads
        assert row.bytes_per_decode_token == row.decode_bytes / 24
        assert row.to_json()["loads"] == row.counts.missed + row.counts.prefetch_loads
    loads = {row.policy: row.counts.loads for row in rows if row.budget_bytes == 4000}
    assert loads["belady"] == min(loads[p] for p in ("on_demand", "lru", "lfu", "belady"))
    on_demand = rows[0]
    assert (on_demand.counts.hit_rate, on_demand.slots) == (0, 2)
    assert on_demand.bytes_per_decode_token == 2 * (1000 + 800 + 600)


def test_one_reading_for_all_decides_as_one_reading_each(trace: Trace) -> None:
    together = replay(trace, ALL, [4000, 9000], ReplaySetup(predictor=MadeUpPredictor(trace.spec)))
    for row in together:
        (alone,) = replay(trace, [row.policy], [row.budget_bytes], ReplaySetup(predictor=MadeUpPredictor(trace.spec)))
        assert alone == row


@pytest.mark.parametrize("compiles", [False, True])
def test_few_events_are_decided_alike_and_without_compiled_code(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    (expected,) = replay(trace, ["foresight"], [9000], AS_RECORDED)
    pools = []

    class Counted(CompiledEvents):
        def __init__(self, *args: Any, **settings: Any) -> None:
            pools.append(self)
            super().__init__(*args, **settings)

    monkeypatch.setattr("moetool.caching.residency.CompiledEvents", Counted)
    monkeypatch.setattr("moetool.tuning.replay.FEW_EVENTS", 4 * 11 * 3 - compiles)
    assert replay(trace, ["foresight"], [9000], AS_RECORDED) == [expected]
    assert len(pools) == compiles


def test_a_prediction_is_computed_once_for_all_runs(trace: Trace) -> None:
    predictor = MadeUpPredictor(trace.spec)
    replay(trace, ["duoserve"], [4000, 9000, 16000], ReplaySetup(predictor=predictor))
    assert predictor.num_observed == 4 * (1 + 6) * 3  # prompts too


@pytest.mark.parametrize("name", [name for name in ALL if name != "belady"])
def test_replay_decides_as_a_driver_of_the_residency_does(trace: Trace, name: str) -> None:
    policy = build_policy(name, trace.spec, {}, 5, predictor=MadeUpPredictor(trace.spec))
    digest = DecisionDigest()
    log: list = []
    residency = Residency(policy, lambda *step: (digest(*step), log.append(step)))
    run_forwards(residency, trace.forwards(sequential=True))
    assert log == list(decisions(trace, name, 5000, ReplaySetup(predictor=MadeUpPredictor(trace.spec))))
    (row,) = replay(trace, [name], [5000], ReplaySetup(predictor=MadeUpPredictor(trace.spec)))
    assert row.digest == digest.hexdigest()


def test_a_log_is_replayed_as_recorded_and_a_batch_by_request(tmp_path: Path) -> None:
    spec = make_spec()
    log = write_trace(tmp_path / "log", spec, batch_size=2, composition="log")
    batch = write_trace(tmp_path / "batch", spec, batch_size=2, composition="batch")

    def digest(trace: Trace, sequential: bool | None) -> str:
        return replay(trace, ["lru"], [6000], ReplaySetup(sequential=sequential))[0].digest

    assert digest(log, None) == digest(log, False) == digest(batch, False)
    assert digest(batch, None) == digest(batch, True) == digest(log, True)
    assert digest(log, True) != digest(log, False)


def test_requests_end_with_their_last_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write_trace(tmp_path / "t", make_spec(), num_requests=3, batch_size=2, composition="log")
    seen: list[tuple[str, int]] = []
    for name in ("begin_request", "end_request"):
        monkeypatch.setattr(
            f"moetool.caching.policies.lru.Policy.{name}", lambda self, r, name=name: seen.append((name[:3], r))
        )
    replay(trace, ["lru"], [6000])
    assert seen == [("beg", 0), ("beg", 1), ("end", 0), ("end", 1), ("beg", 2), ("end", 2)]


def test_only_the_requests_asked_for(trace: Trace) -> None:
    (row,) = replay(trace, ["belady"], [6000], ReplaySetup(requests=frozenset([1, 3])))
    assert row.decode_tokens == 2 * 6
    with refused(UsageError, "nothing", "replay"):
        replay(trace, ["lru"], [6000], ReplaySetup(requests=frozenset([99])))


def test_steps_of_one_run(trace: Trace) -> None:
    steps = list(decisions(trace, "on_demand", 6000))
    assert {layer for _, layer, _ in steps} == {0, 1, 2}
    assert steps[0][0] == 0
    assert steps[0][2].kind == StepKind.LOAD


def test_what_cannot_be_replayed_is_refused(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(CapacityError, "1,999", 1, "1,000", "2,000"):
        replay(trace, ["lru"], [1999])
    with refused(UsageError, "belady"):
        replay(trace, ["beladi"], [6000])
    with refused(UsageError, "predictor"):
        replay(trace, ["duoserve"], [6000])
    monkeypatch.setattr("moetool.caching.policies.lru.Policy.needs", frozenset({"experts", "logits"}))
    with refused(MismatchError, "lru", "logits"):
        replay(trace, ["lru"], [6000])


def test_a_profile_adds_times_and_changes_no_decision(trace: Trace) -> None:
    predictor = MadeUpPredictor(trace.spec)
    profile = make_profile(trace.spec, compute(attention=flat(4), head=5), loads={"disk": flat(6)}, predictor=2)
    plain = replay(trace, ALL, [4000, 9000], ReplaySetup(predictor=predictor))
    timed = replay(trace, ALL, [4000, 9000], ReplaySetup(predictor=predictor, profile=profile))
    assert all(row.timing is None and "seconds" not in row.to_json() for row in plain)
    for without, row in zip(plain, timed, strict=True):
        assert row.digest == without.digest
        assert row.timing is not None
        total = row.timing.total
        assert row.timing.decode_forwards == 4 * 6
        assert total.compute_s + total.prediction_s + total.stall_s == pytest.approx(total.seconds)
        assert (total.prediction_s > 0) == (row.policy == "duoserve")
        assert total.read_bytes <= row.loaded_bytes
        values = row.to_json()
        assert values["in_time"] + values["late"] == values["prefetched"]
        assert values["kept"] + values["in_time"] + values["late"] + values["missed"] == values["needed"]
        assert values["tpot_overlap_bound_s"] <= values["tpot_mean_s"]
    # per token and layer 4 of attention, two loads and two experts, one by one; 5 of the head
    on_demand = timed[0].timing
    assert on_demand is not None
    assert on_demand.tpot_p95_s == on_demand.tpot_p50_s == pytest.approx((3 * (4 + 2 * 9) + 5) * 1e-9)
    # a layer is predicted for each of a token's layers but the first
    assert timed[ALL.index("duoserve") * 2].timing.total.prediction_s == pytest.approx(4 * 6 * 2 * 2e-9)  # type: ignore[union-attr]


def test_misses_are_split_between_link_and_host_by_the_profile(trace: Trace) -> None:
    gpu, host = compute(device="cuda", expert=flat(1), attention=flat(4)), compute(expert=flat(12))
    profile = make_profile(trace.spec, gpu, host, loads={"pinned": flat(10)})
    setup = ReplaySetup(profile=profile, timeline=TimelineOptions(device="cuda", tier="pinned"))
    found = {
        (row.policy, place): row
        for place in ("load", "host", "both")
        for row in replay(trace, ["lru", "foresight", "static_split"], [4000], replace(setup, misses=place))
    }
    for policy in ("lru", "foresight"):
        load, host_only, both = (found[policy, place] for place in ("load", "host", "both"))
        assert not load.counts.hosted and not host_only.counts.missed
        assert both.counts.hosted and both.counts.missed
        seconds = [row.timing.decode.seconds for row in (load, host_only, both) if row.timing is not None]
        assert seconds[2] <= seconds[0] and seconds[2] < seconds[1]
        for row in (load, both):
            assert row.timing is not None and row.bound_s is not None and row.timing.tpot_mean_s is not None
            assert row.bound_s == row.to_json()["tpot_link_and_host_bound_s"]
        costs = SplitCosts(load_s=10e-9, host_s=12e-9, device_s=1e-9, layer_s=4e-9)
        assert replay(trace, [policy], [4000], ReplaySetup(misses="both", split=costs))[0].digest == both.digest
        elsewhere = SplitCosts(load_s=1e-12, host_s=1.0)  # of a server's log; times follow from the profile
        (row,) = replay(trace, [policy], [4000], replace(setup, misses="both", split=elsewhere))
        assert row.bound_s == load.bound_s
    static = {found["static_split", place].digest for place in ("load", "host", "both")}
    assert len(static) == 1 and found["static_split", "both"].misses == "own"
    for wrong, match in (({"misses": "some"}, "some"), ({"misses": "both", "profile": None}, "both")):
        with pytest.raises(UsageError, match=match):
            replay(trace, ["lru"], [4000], replace(setup, **wrong))  # type: ignore[arg-type]


def test_a_profile_that_does_not_say_what_the_policy_costs_is_refused(trace: Trace) -> None:
    profile, predictor = make_profile(trace.spec), MadeUpPredictor(trace.spec)
    with refused(MismatchError, "time", "prediction"):
        replay(trace, ["duoserve"], [9000], ReplaySetup(predictor=predictor, profile=profile))
    replay(trace, ["lru"], [9000], ReplaySetup(predictor=predictor, profile=profile))
    options = TimelineOptions(prediction_ms=0.0)
    replay(trace, ["duoserve"], [9000], ReplaySetup(predictor=predictor, profile=profile, timeline=options))
    with refused(MismatchError, "cuda"):
        replay(trace, ["lru"], [9000], ReplaySetup(profile=profile, timeline=TimelineOptions(device="cuda")))


def test_a_pool_in_bytes_is_never_larger_than_its_budget_and_holds_more(trace: Trace) -> None:
    (slots,), (in_bytes,) = (replay(trace, ["lru"], [9000], ReplaySetup(pool_unit=unit)) for unit in ("slots", "bytes"))
    assert replay(trace, ["lru"], [9000]) == [slots]  # a trace of our own
    assert in_bytes.counts.hit_rate > slots.counts.hit_rate
    everything = whole_bytes(trace, pool_unit="bytes")
    assert (everything, whole_bytes(trace)) == (8 * 2400, 24 * 1000)
    whole, less = replay(trace, ["lru"], [everything, everything - 1], ReplaySetup(pool_unit="bytes"))
    assert whole.counts.missed <= 24 < less.counts.missed
    with refused(UsageError, "bytes"):
        replay(trace, ["lru"], [9000], ReplaySetup(pool_unit="byte"))
    with refused(UsageError, "slots", "layer, mixed, one"):
        replay(trace, ["lru"], [9000], ReplaySetup(pool="slots"))
    with refused(UsageError, "layer"):
        replay(trace, ["lru"], [9000], ReplaySetup(pool="layer", pool_unit="bytes"))


def test_a_policy_that_takes_few_slots_gets_few_bytes(trace: Trace) -> None:
    predictor = MadeUpPredictor(trace.spec)
    few, many = replay(trace, ["duoserve"], [2000, 9000], ReplaySetup(predictor=predictor, pool_unit="bytes"))
    assert few.slots == many.slots == 2
    assert few.digest == many.digest


def test_rows_of_policies_that_predict_count_the_requests_of_the_training(trace: Trace) -> None:
    setup = ReplaySetup(predictor=MadeUpPredictor(trace.spec), trained_on={0, 2, 3})
    rows = {row.policy: row for row in replay(trace, ["lru", "duoserve"], [9000], setup)}
    assert (rows["lru"].trained_on, rows["duoserve"].trained_on) == (0, 3)
    (row,) = replay(trace, ["duoserve"], [9000], replace(setup, requests=frozenset({1, 3})))
    assert row.trained_on == row.to_json()["trained_on"] == 1
    (row,) = replay(trace, ["duoserve"], [9000], replace(setup, requests=frozenset({1})))
    assert row.trained_on == 0
