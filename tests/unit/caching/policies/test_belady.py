"""Belady is the optimum of the core: no policy that loads on demand makes fewer loads."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import combinations, permutations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Residency
from tests.refusals import refused
from tests.synthetic import make_spec, random_stream, run_forwards

Events = list[list[int]]


def loads(policy: Policy, events: Events) -> int:
    """Loads of a stream of events, each the keys it needs; every event counts as a forward of one layer."""
    residency = Residency(policy)
    for number, keys in enumerate(events):
        info = ForwardInfo(forward_id=number, request_T=(0,), phase_T=(1,), position_T=(number,))
        residency.begin_forward(info)
        residency.event(GateEvent(forward=info, layer=0, experts_TK=(tuple(keys),)))
        residency.end_forward(info)
    assert residency.counts.prefetch_loads == 0
    return residency.counts.loads


def optimum(events: Events, num_slots: int) -> int:
    """Fewest loads, by trying every content that the pool can have after each event.

    After an event the pool holds any of what it held and of what the event needs, filled as far as that goes;
    and if anything was loaded, something that was (the last load is still there).
    """
    sets = [frozenset(event) for event in events]

    @lru_cache(None)
    def fewest(index: int, held: frozenset[int]) -> int:
        if index == len(sets):
            return 0
        missed = sets[index] - held
        after = held | sets[index]
        contents = map(frozenset, combinations(sorted(after), min(num_slots, len(after))))
        return len(missed) + min(fewest(index + 1, c) for c in contents if not missed or c & missed)

    return fewest(0, frozenset())


def belady(spec: ModelSpec, events: Events, num_slots: int) -> Policy:
    return build_policy("belady", spec, {}, num_slots, future=events)


class RandomPolicy(Policy):
    """Any demand-loading policy: random victims, random order, in order or ahead."""

    def __init__(self, spec: ModelSpec, num_slots: int, seed: int) -> None:
        super().__init__(spec, None, num_slots)
        self._random = Random(seed)
        self._resident: set[int] = set()
        self.in_order = self._random.random() < 0.5  # type: ignore[misc]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._random.shuffle(misses)
        return misses

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident.add(key)

    def removed(self, key: int) -> None:
        self._resident.remove(key)

    def evict(self, locked: Collection[int]) -> int:
        return self._random.choice(sorted(self._resident - set(locked)))


event_streams = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=4).map(sorted), max_size=9)


@settings(max_examples=300, deadline=None)
@given(events=event_streams, num_slots=st.integers(2, 4))
def test_belady_is_the_optimum(events: Events, num_slots: int) -> None:
    spec = make_spec(layers=1, experts=6)
    assert loads(belady(spec, events, num_slots), events) == optimum(events, num_slots)


@settings(max_examples=100, deadline=None)
@given(events=event_streams, num_slots=st.integers(2, 4), seed=st.integers(0, 1 << 16))
def test_the_optimum_bounds_every_demand_loading_policy(events: Events, num_slots: int, seed: int) -> None:
    spec = make_spec(layers=1, experts=6)
    assert loads(RandomPolicy(spec, num_slots, seed), events) >= optimum(events, num_slots)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    num_slots=st.integers(2, 30),
    prompt_tokens=st.integers(0, 8),
    top_k=st.integers(1, 4),
)
def test_no_policy_makes_fewer_loads_than_belady(seed: int, num_slots: int, prompt_tokens: int, top_k: int) -> None:
    spec = make_spec(layers=4, experts=8, top_k=top_k)
    stream = list(random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=12, seed=seed))
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events in stream for e in events]

    def run(policy: Policy) -> int:
        residency = Residency(policy)
        run_forwards(residency, stream)
        return residency.counts.loads

    fewest = run(belady(spec, future, num_slots))
    others = [build_policy(name, spec, {}, num_slots) for name in ("on_demand", "lru", "lfu")]
    others.append(build_policy("lfu", spec, {"forget": True}, num_slots))
    others.append(build_policy("belady", spec, {"whole_events": True}, num_slots, future=future))
    others.append(RandomPolicy(spec, num_slots, seed))
    for policy in others:
        assert run(policy) >= fewest


def test_whole_events_give_up_nothing_of_the_event_before_it_is_over() -> None:
    spec = make_spec(layers=1, experts=4)
    events = [[0, 1], [0, 2], [1]]  # at the second event 0 may go once it is computed, and 1 stays

    def policy(whole_events: bool) -> Policy:
        return build_policy("belady", spec, {"whole_events": whole_events}, 2, future=events)

    assert loads(policy(False), events) == 3
    assert loads(policy(True), events) == 4


def test_equal_next_uses_are_told_apart_by_what_follows() -> None:
    # After the first event a, b and c are next needed by the same event, and two of them fit. c must be one: the
    # absent one is loaded there and has to stay, and c is not needed again. A rule that looks at the next use
    # alone fails for some naming of the three.
    spec = make_spec(layers=1, experts=6)
    for a, b, c in permutations(range(3)):
        events = [sorted([a, b, c, 3]), sorted([a, b, c]), sorted([a, b])]
        assert loads(belady(spec, events, 2), events) == optimum(events, 2)


def test_belady_cannot_serve() -> None:
    with refused(UsageError, "replay"):
        build_policy("belady", make_spec(), {}, 4)
