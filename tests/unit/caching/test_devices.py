"""Devices that share a model: whose expert is whose, how the slots are shared out, and programs made of several."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.devices import (
    DevicePolicies,
    DevicePools,
    build_policies,
    open_pool,
    own_part,
    split_bytes,
    split_slots,
)
from moetool.caching.policies import lru
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Residency, Step, StepKind
from moetool.runtime.policy_state import restore_state, save_state
from moetool.tuning.replay import ReplaySetup, decisions, replay
from tests.engines import RandomPolicy
from tests.profiles import make_profile
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_spec, random_stream, run_forwards, slots_of, write_trace

COMPUTE, LOAD, PREFETCH, HOST = StepKind.COMPUTE, StepKind.LOAD, StepKind.PREFETCH, StepKind.HOST
SPEC = make_spec(layers=3, experts=8, top_k=2)


def drive(pool: Any, stream: list[Any]) -> list[tuple[int, int, Step]]:
    """Every step of a stream."""
    steps: list[tuple[int, int, Step]] = []
    pool.sink = lambda *step: steps.append(step)
    run_forwards(pool, stream)
    return steps


def stream_of(spec: Any = SPEC, seed: int = 3) -> list[Any]:
    return list(random_stream(spec, num_requests=2, prompt_tokens=5, new_tokens=9, seed=seed, signals=True))


def event(experts: list[int], layer: int = 0) -> GateEvent:
    info = ForwardInfo(forward_id=0, request_T=(0,), phase_T=(Phase.DECODE,), position_T=(0,))
    return GateEvent(forward=info, layer=layer, experts_TK=(tuple(experts),))


@pytest.mark.parametrize("share", [(0, 2), (1, 2), (2, 3), (7, 8)])
def test_a_device_never_touches_anothers_experts(share: tuple[int, int]) -> None:
    device, count = share
    residency = Residency(RandomPolicy(SPEC, 2, seed=device), share=share)  # it asks for any expert of the model
    stream = stream_of()
    steps = drive(residency, stream)
    assert {step.key % count for _, _, step in steps} == {device}
    assert any(step.kind is PREFETCH for _, _, step in steps)
    computed = [(forward, step.key) for forward, _, step in steps if step.kind is COMPUTE]
    assert sorted(computed) == [
        (info.forward_id, event.layer * 8 + expert)
        for info, events in stream
        for event in events
        for expert in event.needed
        if (event.layer * 8 + expert) % count == device
    ]


def test_each_device_is_an_lru_of_its_own_and_the_counts_add_up() -> None:
    slots, count = 7, 3
    stream = list(random_stream(SPEC, num_requests=2, prompt_tokens=0, new_tokens=60, seed=3))
    shares = split_slots(SPEC, slots, count)
    assert shares == [3, 2, 2]
    pool = open_pool(build_policies("lru", SPEC, {}, shares))
    drive(pool, stream)
    hits = misses = 0
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in shares]
    for _, events in stream:
        for e in events:
            for device, cache in enumerate(caches):
                own = [e.layer * 8 + x for x in e.needed if (e.layer * 8 + x) % count == device]
                here = [key for key in own if key in cache]
                hits, misses = hits + len(here), misses + len(own) - len(here)
                for key in here:
                    cache.move_to_end(key)
                for key in own:
                    if key not in here:
                        if len(cache) == shares[device]:
                            del cache[next(k for k in cache if k not in own)]
                        cache[key] = None
    counts = pool.counts
    assert (counts.kept, counts.missed) == (hits, misses) and hits > 20
    assert counts == sum((r.counts for r in pool.residencies[1:]), pool.residencies[0].counts)
    assert counts == pool.prefill + pool.decode and pool.num_slots == slots == pool.places
    assert all(key % count == r for r, res in enumerate(pool.residencies) for key in res.slot_of)


@pytest.mark.parametrize("name", ["lru", "duoserve", "finemoe", "belady"])
def test_a_fleet_of_one_decides_as_one_device_does(name: str) -> None:
    stream = stream_of()
    future = [[e.layer * 8 + x for x in e.needed] for _, events in stream for e in events]
    results = []
    for fleet in (False, True):
        policy = build_policy(name, SPEC, {}, 9, predictor=MadeUpPredictor(SPEC), future=future)
        results.append(drive(DevicePools([Residency(policy)]) if fleet else open_pool([policy]), stream))
    assert type(open_pool([policy])) is Residency
    assert results[0] == results[1]


def test_all_devices_load_before_any_computes_and_slots_count_through() -> None:
    pool = open_pool([lru.Policy(SPEC, None, 2), lru.Policy(SPEC, None, 2)])
    assert pool.event(event([0, 1, 2, 4, 5])) == [
        Step(LOAD, 0, 0),
        Step(LOAD, 2, 1),
        Step(LOAD, 1, 2),
        Step(LOAD, 5, 3),
        Step(COMPUTE, 0, 0),
        Step(LOAD, 4, 0, 0),
        Step(COMPUTE, 1, 2),
        Step(COMPUTE, 2, 1),
        Step(COMPUTE, 5, 3),
        Step(COMPUTE, 4, 0),
    ]
    assert slots_of(pool) == {2: 1, 4: 0, 1: 2, 5: 3}
    assert pool.event(event([2], layer=0)) == [Step(COMPUTE, 2, 1)]  # the other device has nothing to do


def test_what_the_host_computes_comes_first() -> None:
    class Odd(lru.Policy):
        computes_on_host = True

        def on_host(self, event: GateEvent, misses: list[int]) -> list[int]:
            return misses[1:]

    pool = open_pool([Odd(SPEC, None, 2), Odd(SPEC, None, 2)])
    steps = pool.event(event([0, 1, 2, 3]))
    assert [step.kind for step in steps] == [HOST, HOST, LOAD, LOAD, COMPUTE, COMPUTE]
    assert [step.key for step in steps] == [2, 3, 0, 1, 0, 1]
    assert pool.counts.hosted == 2


def test_substitution_sees_what_is_resident_anywhere() -> None:
    seen: list[int] = []

    class Routing(lru.Policy):
        lossless = False

        def route(self, event: GateEvent, resident: Any) -> None:
            seen.extend(key for key in range(8) if resident(key))

    pool = open_pool([Routing(SPEC, None, 3) for _ in range(2)])
    pool.event(event([1, 4, 6]))
    assert pool.route(event([0])) is None
    assert seen == [1, 4, 6]
    assert open_pool([lru.Policy(SPEC, None, 3) for _ in range(2)]).route(event([0])) is None


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_slots_are_shared_out_evenly_and_none_is_left_over(devices: int) -> None:
    spec = make_spec(layers=2, experts=8)
    spec = type(spec).from_json({**spec.to_json(), "num_experts_L": [5, 8]})  # keys 0 to 4 and 8 to 15
    keys = [*range(5), *range(8, 16)]
    owned = [sum(key % devices == device for key in keys) for device in range(devices)]
    assert [own_part(spec, device, devices).total_experts for device in range(devices)] == owned
    for slots in range(2 * devices, 20):
        shares = split_slots(spec, slots, devices)
        assert sum(shares) == min(slots, 13)
        assert all(share <= own for share, own in zip(shares, owned, strict=True))
        assert max(shares) - min(shares) <= 1 or any(s == o for s, o in zip(shares, owned, strict=True))
    assert split_slots(spec, 13, devices) == owned  # all fit, whoever has how many
    with refused(CapacityError, "leave", "smallest", "2"):
        split_slots(spec, 2 * devices - 1, devices)


def test_a_policy_sizes_itself_by_the_experts_that_are_its_own() -> None:
    assert [p.num_slots for p in build_policies("layerwise", SPEC, {}, [4, 4])] == [4, 4]  # half of a layer each
    with refused(CapacityError, "layerwise", 4, 3):
        build_policies("layerwise", SPEC, {}, [4, 3])
    policies = build_policies("static_split", SPEC, {}, [9, 9])
    assert [p.num_slots for p in policies] == [8, 8]
    pool = open_pool(policies)
    drive(pool, stream_of())
    assert sorted(slots_of(pool)) == list(range(16))  # two whole layers, half of each on either


def test_devices_ask_one_predictor() -> None:
    predictor, stream = MadeUpPredictor(SPEC), stream_of()
    drive(open_pool(build_policies("promoe", SPEC, {}, [6, 6], predictor=predictor)), stream)
    assert predictor.num_observed == sum(len(events) for _, events in stream)


@pytest.mark.parametrize("name", ["lfu", "moe_infinity", "lru"])
def test_what_devices_learn_is_kept_for_as_many(name: str, tmp_path: Path) -> None:
    def made() -> list[Policy]:
        return build_policies(name, SPEC, {}, [4, 4])

    file, policies = tmp_path / "state", made()
    drive(open_pool(policies), stream_of())
    save_state(file, name, DevicePolicies(policies))
    assert file.exists() == (name != "lru")
    again = made()
    assert (restore_state(file, name, DevicePolicies(again)) is not None) == file.exists()
    for one, other in zip(policies, again, strict=True):
        assert {k: v.tolist() for k, v in one.state().items()} == {k: v.tolist() for k, v in other.state().items()}
    if file.exists():
        for number in (1, 3):
            others = build_policies(name, SPEC, {}, [2] * number)
            with pytest.raises(MismatchError, match=f"does not fit these options of {name}"):
                restore_state(file, name, others[0] if number == 1 else DevicePolicies(others))


@pytest.mark.parametrize("unit", ["slots", "bytes"])
@pytest.mark.parametrize("name", ["lru", "belady", "duoserve", "layerwise"])
def test_replay_shares_the_budget_out(name: str, unit: str, tmp_path: Path) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2, expert_bytes=(1000, 800, 600))
    trace = write_trace(tmp_path / "t", spec, num_requests=4, new_tokens=6)
    alone = ReplaySetup(predictor=MadeUpPredictor(spec), pool_unit=unit)
    shared = replace(alone, devices=2)
    (one,) = replay(trace, [name], [17_000], alone)
    (same,) = replay(trace, [name], [17_000], replace(alone, devices=1))
    (two,) = replay(trace, [name], [17_000], shared)
    assert (one.devices, two.devices, two.to_json()["devices"]) == (1, 2, 2)
    assert one == same
    assert one.counts.needed == two.counts.needed
    assert one.digest != two.digest
    digest, held, most = DecisionDigest(), {}, [0, 0]  # type: ignore[var-annotated]
    for step in decisions(trace, name, 17_000, shared):
        digest(*step)
        if step[2].kind in (LOAD, PREFETCH):
            held[step[2].slot] = step[2].key
            for device in range(2):
                most[device] = max(most[device], sum(key % 2 == device for key in held.values()))
    assert digest.hexdigest() == two.digest
    if unit == "slots":
        assert max(most) <= 9 and two.slots == {"duoserve": 4}.get(name, 17)
    else:
        assert split_bytes(spec, 17_000, 2) == [8, 8]


def test_several_devices_have_no_timeline(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", SPEC)
    with refused(UsageError, 2):
        replay(trace, ["lru"], [9000], ReplaySetup(profile=make_profile(SPEC), devices=2))
