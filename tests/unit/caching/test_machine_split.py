"""The split of misses: against every other split of random events, against a finer model of time, and in a pool."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.machine_split import EventWork, MachineSplit, SplitCosts
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency, Step, StepKind
from tests.synthetic import make_spec, random_stream

_seconds = st.floats(0.01, 3.0)


@st.composite
def works(draw: st.DrawFn, disk: bool = False, most: int = 8, device_grows: bool = False) -> EventWork:
    """Up to `most` misses with equal loads and some tokens each, most first."""
    share, host_s = draw(st.floats(0.5, 1.0)), draw(_seconds)
    device_s = draw(st.floats(0.0, min(0.05, host_s)))
    growth = draw(st.sampled_from([0.0, 0.05, 0.5]))
    on_device = growth * draw(st.sampled_from([0.1, 0.5, 1.0])) if device_grows else 0.0
    costs = SplitCosts(
        load_s=draw(_seconds),
        host_s=host_s,
        host_knots=((2.0, host_s + growth),),
        device_s=device_s,
        device_knots=((2.0, device_s + on_device),),
        start_s=draw(st.sampled_from([0.0, 0.1])),
        link_share=share,
        host_share=draw(st.floats(0.5, 1.0)) if draw(st.booleans()) else share,
        disk_s=draw(_seconds) if disk else 0.0,
    )
    tokens = sorted(draw(st.lists(st.integers(1, 21), min_size=1, max_size=most)), reverse=True)
    return EventWork(
        costs=costs,
        resident_s=draw(st.sampled_from([0.0, 0.2])),
        link_s=draw(st.sampled_from([0.0, 0.3])),
        host_N=[costs.host(number) for number in tokens],
        device_N=[costs.device(number) for number in tokens],
        on_disk_N=[draw(st.booleans()) for _ in tokens] if disk else (),
    )


def simulated_end(work: EventWork, loaded: Sequence[int]) -> float:
    """The end of an event by its definition: two servers of one queue each, slower while both work.

    Independent of `EventWork.ends`: it goes from one change to the next.
    """
    costs, chosen = work.costs, set(loaded)
    on_disk = work.on_disk_N or [False] * len(work.host_N)
    reads = np.cumsum(on_disk) * costs.disk_s
    ready = [float(read) if late else 0.0 for read, late in zip(reads, on_disk, strict=True)]
    order = sorted(range(len(ready)), key=lambda i: (ready[i], i))
    queues = {
        "link": [(0.0, work.link_s)] * bool(work.link_s) + [(ready[i], costs.load_s) for i in order if i in chosen],
        "host": [(ready[i], work.host_N[i]) for i in order if i not in chosen],
    }
    if queues["host"]:
        queues["host"].insert(0, (0.0, costs.start_s))
    share = {"link": costs.link_share, "host": costs.host_share}
    now, ends = 0.0, {"link": 0.0, "host": 0.0}
    while any(queues.values()):
        working = [side for side, queue in queues.items() if queue and queue[0][0] <= now]
        rates = {side: share[side] if len(working) == 2 else 1.0 for side in working}
        changes = [queues[side][0][1] / rates[side] for side in working]
        changes += [queue[0][0] - now for queue in queues.values() if queue and queue[0][0] > now]
        passed = min(changes)
        now += passed
        for side in working:
            at, left = queues[side][0]
            left -= passed * rates[side]
            queues[side][0] = (at, left)
            if left <= 1e-12:
                queues[side].pop(0)
                ends[side] = now
    device = work.resident_s + sum(work.device_N[i] for i in chosen)
    return max(device, ends["link"] + costs.device_s if ends["link"] else 0.0, ends["host"])


def every_split(work: EventWork) -> list[tuple[int, ...]]:
    places = range(len(work.host_N))
    return list(chain.from_iterable(combinations(places, count) for count in range(len(places) + 1)))


@pytest.mark.parametrize("kinds", [{}, {"disk": True}, {"most": 10, "device_grows": True}], ids=str)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_split_of_an_event_ends_sooner(kinds: dict[str, Any], data: st.DataObject) -> None:
    work = data.draw(works(**kinds))
    best = min(simulated_end(work, loaded) for loaded in every_split(work))
    assert simulated_end(work, work.loaded()) <= best * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(works(), st.data())
def test_ends_are_those_of_the_finer_model(work: EventWork, data: st.DataObject) -> None:
    loaded = data.draw(st.sampled_from(every_split(work)))
    assert work.ends(loaded)[0] == pytest.approx(simulated_end(work, loaded), abs=1e-6)


COSTS = SplitCosts(load_s=1.0, host_s=1.0, layer_s=0.5)


def event(*experts: Sequence[int], layer: int = 0) -> GateEvent:
    tokens = len(experts)
    info = ForwardInfo(
        forward_id=0, request_T=(0,) * tokens, phase_T=(Phase.DECODE,) * tokens, position_T=tuple(range(tokens))
    )
    return GateEvent(forward=info, layer=layer, experts_TK=tuple(map(tuple, experts)))


def test_costs_must_be_possible() -> None:
    for wrong in ({"load_s": -1.0}, {"link_share": 0.0}, {"host_share": 1.5}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            replace(COSTS, **wrong)
    with pytest.raises(UsageError, match="half"):
        MachineSplit(make_spec(), COSTS, "half")
    assert COSTS.digest == replace(COSTS).digest != replace(COSTS, host_s=2.0).digest


def test_the_host_takes_the_misses_with_fewest_tokens_then_those_worth_least() -> None:
    split = MachineSplit(make_spec(top_k=2), COSTS)
    assert split.choose(event([0, 1], [0, 2], [0, 1]), [], [0, 1, 2], [0.0] * 3) == {2}
    split = MachineSplit(make_spec(top_k=2), COSTS)
    assert split.choose(event([0, 1]), [], [0, 1], [0.1, 0.7]) == {0}


def test_a_transfer_that_still_runs_sends_a_miss_to_the_host() -> None:
    slow = replace(COSTS, load_s=0.9, layer_s=0.0)
    split = MachineSplit(make_spec(top_k=2), slow)
    assert split.choose(event([0, 1]), [0], [1], [0.0]) == set()
    split.note([Step(StepKind.PREFETCH, 8, 3)])
    assert split.choose(event([2, 0]), [0], [2], [0.0]) == {2}  # 1.0 on the host, 1.8 behind the prefetch
    assert split.choose(event([3, 0]), [0], [3], [0.0]) == set()  # which has ended meanwhile


def test_an_expert_on_disk_is_read_once_as_long_as_host_memory_holds_it() -> None:
    # from disk both end sooner on the host (at 1.5); from memory one of them is loaded (0.6)
    costs = replace(COSTS, disk_s=0.5, load_s=0.6, host_s=0.5)
    split = MachineSplit(make_spec(top_k=2), costs, host_experts=2)
    hosted = [len(split.choose(event(misses), [], misses, [0.0, 0.0])) for misses in ([0, 1], [0, 1], [2, 3], [0, 1])]
    assert hosted == [2, 1, 2, 2]


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "foresight"])
@pytest.mark.parametrize("mode", ["host", "both"])
@pytest.mark.parametrize("layer_slots", [(), (3, 3, 3)])
def test_a_split_pool_computes_each_expert_once_and_repeats_itself(
    policy: str, mode: str, layer_slots: tuple[int, ...]
) -> None:
    spec = make_spec(layers=3, experts=8, top_k=3)
    programs: list[list[Step]] = []
    for _ in range(2):
        split = MachineSplit(spec, replace(COSTS, load_s=0.7, link_share=0.8), mode)
        residency = Residency(build_policy(policy, spec, {}, 9), split=split, layer_slots=layer_slots)
        steps: list[Step] = []
        for info, events in random_stream(spec, num_requests=2, prompt_tokens=4, new_tokens=40, seed=3):
            steps += residency.begin_forward(info)
            for each in events:
                program = residency.event(each)
                computed = [s.key for s in program if s.kind in (StepKind.COMPUTE, StepKind.HOST)]
                assert sorted(computed) == [spec.expert_key(each.layer, expert) for expert in each.needed]
                assert len(residency.slot_of) <= 9
                steps += program
            residency.end_forward(info)
        programs.append(steps)
        counts = residency.counts
        assert counts.hosted > 0 and (counts.missed > 0) == (mode == "both")
        assert counts.prefetch_loads > 0 and counts.prefetched > 0  # admitted, and used later
    assert programs[0] == programs[1]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_by_value_fewer_experts_are_admitted(policy: str) -> None:
    spec = make_spec(layers=2, experts=16, top_k=2)
    loads = []
    for admit in ("published", "value"):
        residency = Residency(build_policy(policy, spec, {"admit": admit}, 6), split=MachineSplit(spec, COSTS, "host"))
        for info, events in random_stream(spec, num_requests=1, prompt_tokens=0, new_tokens=80, seed=5):
            residency.begin_forward(info)
            for each in events:
                residency.event(each)
            residency.end_forward(info)
        loads.append(residency.counts.loads)
    assert 6 <= loads[1] < loads[0]
    with pytest.raises(UsageError, match="always"):
        build_policy(policy, spec, {"admit": "always"}, 6)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_admission_by_value_compares_uses(policy: str) -> None:
    # by the definition: lru compares the last uses before the event, lfu the numbers of uses with it
    spec = make_spec(layers=1, experts=5, top_k=1)
    for seed in range(20):
        chosen = np.random.default_rng(seed).integers(0, 5, 60).tolist()
        split = MachineSplit(spec, replace(COSTS, load_s=1e-9), "host")
        residency = Residency(build_policy(policy, spec, {"admit": "value"}, 2), split=split)
        last, uses = dict.fromkeys(range(5), -1), dict.fromkeys(range(5), 0)
        for at, key in enumerate([0, 1, 2, 3, 2, 3, *chosen]):
            before = set(residency.slot_of)
            value = last if policy == "lru" else uses
            victim = min(before, key=lambda other: (value[other], last[other]), default=key)
            expected = key in before or len(before) < 2 or value[key] + (policy == "lfu") > value[victim]
            residency.event(event([key]))
            last[key], uses[key] = at, uses[key] + 1
            assert (key in residency.slot_of) == expected, (seed, at)
