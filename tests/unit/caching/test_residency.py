"""The decision core: programs, classes of hits, and what it refuses."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from moetool.base.errors import CapacityError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.policy import Policy
from moetool.caching.residency import Residency, Step, StepKind
from tests.refusals import refused
from tests.synthetic import make_forward, make_spec

COMPUTE, LOAD, PREFETCH = StepKind.COMPUTE, StepKind.LOAD, StepKind.PREFETCH


class Scripted(Policy):
    """First in, first out, and what the test says to prefetch or to give up."""

    def __init__(self, num_slots: int, *, layers: int = 2, in_order: bool = False) -> None:
        super().__init__(make_spec(layers=layers, experts=8), None, num_slots)
        self.in_order = in_order  # type: ignore[misc]
        self.queue: list[int] = []
        self.first: Sequence[int] = ()
        self.ahead: Sequence[int] = ()
        self.drop: Sequence[int] = ()
        self.beside: Sequence[int] = ()
        self.calls: list[tuple[str, int]] = []

    def begin_request(self, request: int) -> None:
        self.calls.append(("begin", request))

    def end_request(self, request: int) -> None:
        self.calls.append(("end", request))

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        return self.first

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        return [*misses, *self.beside]

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        return self.ahead

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        return self.drop

    def admit(self, key: int, prefetched: bool) -> None:
        self.queue.append(key)

    def removed(self, key: int) -> None:
        self.queue.remove(key)

    def evict(self, locked: Collection[int]) -> int:
        return next(key for key in self.queue if key not in locked)


def event(experts: list[int], *, layer: int = 0, phase: Phase = Phase.DECODE) -> GateEvent:
    info = ForwardInfo(forward_id=0, request_T=(0,), phase_T=(phase,), position_T=(0,))
    return GateEvent(forward=info, layer=layer, experts_TK=(tuple(experts),))


def test_misses_are_loaded_ahead_of_computing_as_far_as_slots_go() -> None:
    residency = Residency(Scripted(2))
    assert residency.event(event([1, 2, 3])) == [
        Step(LOAD, 1, 0),
        Step(LOAD, 2, 1),
        Step(COMPUTE, 1, 0),
        Step(LOAD, 3, 0, 1),
        Step(COMPUTE, 2, 1),
        Step(COMPUTE, 3, 0),
    ]


def test_in_order_loads_and_computes_by_turns_after_the_residents() -> None:
    residency = Residency(Scripted(3, in_order=True))
    residency.event(event([2]))
    assert residency.event(event([1, 2, 3])) == [
        Step(COMPUTE, 2, 0),
        Step(LOAD, 1, 1),
        Step(COMPUTE, 1, 1),
        Step(LOAD, 3, 2),
        Step(COMPUTE, 3, 2),
    ]


def test_a_resident_that_the_event_needs_is_not_given_up_before_it_is_computed() -> None:
    residency = Residency(Scripted(2))
    residency.event(event([1]))
    residency.event(event([2]))
    assert residency.event(event([1, 3])) == [
        Step(LOAD, 3, 1, 2),  # 1 is older, but needed
        Step(COMPUTE, 1, 0),
        Step(COMPUTE, 3, 1),
    ]


def test_prefetches_wait_for_the_misses_and_for_slots() -> None:
    policy = Scripted(2)
    residency = Residency(policy)
    policy.ahead = (9, 10, 11)
    assert residency.event(event([1, 2])) == [
        Step(LOAD, 1, 0),
        Step(LOAD, 2, 1),
        Step(COMPUTE, 1, 0),
        Step(PREFETCH, 9, 0, 1),
        Step(COMPUTE, 2, 1),
        Step(PREFETCH, 10, 1, 2),  # 11 finds no slot: it is worth less than 9 and 10
    ]
    policy.ahead = ()
    residency.event(event([1, 3], layer=1))
    assert residency.counts.prefetched == 1  # 9 is expert 1 of layer 1
    assert residency.counts.wasted == 1
    assert (residency.counts.kept, residency.counts.missed, residency.counts.prefetch_loads) == (0, 3, 2)


def test_what_the_gate_asks_for_beside_the_misses_is_loaded_once_they_have_their_slots() -> None:
    policy = Scripted(4)
    residency = Residency(policy)
    residency.event(event([1]))
    policy.beside = (5, 1, 6, 7)
    policy.ahead = (9,)
    assert residency.event(event([2, 3])) == [
        Step(LOAD, 2, 1),
        Step(LOAD, 3, 2),
        Step(LOAD, 5, 3),  # 1 is there and stays, as if it were needed; 6 and 7 find no slot yet
        Step(COMPUTE, 2, 1),
        Step(LOAD, 6, 1, 2),
        Step(COMPUTE, 3, 2),
        Step(PREFETCH, 9, 2, 3),  # 7 comes too late: nothing is computed after it
    ]
    policy.beside = policy.ahead = ()
    residency.event(event([5]))
    counts = residency.counts
    assert (counts.missed, counts.prefetch_loads, counts.prefetched) == (3, 3, 1)
    assert counts.loads == 6


def test_a_gate_that_asks_for_others_instead_of_the_misses_is_refused() -> None:
    policy = Scripted(4)
    residency = Residency(policy)
    policy.gate = lambda event, hits, misses: [misses[0], 7]  # type: ignore[method-assign]
    with refused(ValueError, "[1, 7]", "[1, 2]"):
        residency.event(event([1, 2]))


def test_a_prefetched_expert_counts_as_kept_from_its_second_use_on() -> None:
    policy = Scripted(4)
    residency = Residency(policy)
    policy.first = (1,)
    info, _ = make_forward(policy.spec, np.zeros((1, 2, 2), int))
    assert residency.begin_forward(info) == [Step(PREFETCH, 1, 0)]
    residency.event(event([1]))
    residency.event(event([1]))
    assert (residency.counts.prefetched, residency.counts.kept) == (1, 1)


def test_what_is_given_up_after_an_event_frees_its_slot() -> None:
    policy = Scripted(2)
    residency = Residency(policy)
    policy.drop = (1,)
    residency.event(event([1, 2]))
    assert residency.slot_of == {2: 1}
    policy.drop = ()
    assert residency.event(event([1])) == [Step(LOAD, 1, 0), Step(COMPUTE, 1, 0)]


def test_prefill_and_decode_are_counted_apart() -> None:
    residency = Residency(Scripted(4))
    for forward_id, phase in enumerate((Phase.PREFILL, Phase.DECODE)):
        info, events = make_forward(residency.policy.spec, np.array([[[0, 1]] * 2]), forward_id=forward_id, phase=phase)
        residency.begin_forward(info)
        for one in events:
            residency.event(one)
    assert (residency.prefill.missed, residency.prefill.kept) == (4, 0)
    assert (residency.decode.missed, residency.decode.kept) == (0, 4)
    assert residency.counts.hit_rate == 0.5


def test_requests_are_announced_once_and_ended_once() -> None:
    policy = Scripted(4)
    residency = Residency(policy)
    for _ in range(2):
        residency.begin_forward(make_forward(policy.spec, np.zeros((2, 2, 2), int), request=7)[0])
    residency.end_request(7)
    residency.end_request(7)
    residency.end_request(8)
    assert policy.calls == [("begin", 7), ("end", 7)]


def test_too_small_a_pool_is_refused() -> None:
    with refused(CapacityError, 1, 2, "2,000"):
        Residency(Scripted(1))


def test_a_policy_that_would_give_a_wrong_weight_is_stopped() -> None:
    class Forgetful(Scripted):
        def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
            return misses[1:]

    with refused(ValueError, "gate", "misses"):
        Residency(Forgetful(2)).event(event([1, 2]))
    for evicted in (1, 9, None):  # still needed, not resident, no expert
        policy = Scripted(2)
        policy.evict = lambda locked, key=evicted: key  # type: ignore[method-assign, misc]
        residency = Residency(policy)
        residency.event(event([1, 2]))
        with refused(ValueError, "evict", evicted, "does not need"):
            residency.event(event([1, 3]))


def test_a_pool_in_bytes_gives_up_as_many_as_a_larger_expert_needs() -> None:
    class Sized(Scripted):
        def __init__(self) -> None:
            super().__init__(2)
            self.spec = make_spec(layers=2, experts=8, expert_bytes=(10, 25))

    policy = Sized()
    residency = Residency(policy, capacity_bytes=55)
    residency.event(event([0, 1, 2, 3, 4]))
    assert len(residency.slot_of) == 5  # as many as fit by their own size
    assert residency.event(event([0], layer=1)) == [Step(LOAD, 8, 1, 1), Step(COMPUTE, 8, 1)]
    assert sorted(residency.slot_of) == [2, 3, 4, 8]
    assert residency.event(event([1, 2], layer=1)) == [
        Step(LOAD, 9, 4, 4),
        Step(LOAD, 10, 1, 8),
        Step(COMPUTE, 9, 4),
        Step(COMPUTE, 10, 1),
    ]
    policy.ahead = [5, 6]
    assert residency.event(event([2], layer=1))[-2:] == [Step(PREFETCH, 5, 4, 9), Step(PREFETCH, 6, 3)]
    assert sum(policy.spec.expert_bytes_L[key // 8] for key in residency.slot_of) <= 55
    assert residency.counts.wasted == 0


@pytest.mark.parametrize("in_order", [False, True])
def test_with_experts_of_one_size_bytes_and_slots_are_the_same(in_order: bool) -> None:
    rng = np.random.default_rng(3)
    by_slots, in_bytes = Scripted(4, in_order=in_order), Scripted(4, in_order=in_order)
    pools = Residency(by_slots), Residency(in_bytes, capacity_bytes=4 * 1000 + 999)
    for _ in range(200):
        needed = sorted(set(rng.integers(0, 8, 6).tolist()))
        by_slots.ahead = in_bytes.ahead = rng.integers(0, 16, 2).tolist()
        coming = event(needed, layer=int(rng.integers(2)))
        assert pools[0].event(coming) == pools[1].event(coming)


def test_what_the_host_computes_takes_no_slot_and_is_no_miss() -> None:
    class Halved(Scripted):
        computes_on_host = True

        def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
            return misses[::2]

    residency = Residency(Halved(4))
    assert residency.event(event([1, 2, 3])) == [
        Step(StepKind.HOST, 1, -1),
        Step(StepKind.HOST, 3, -1),
        Step(LOAD, 2, 0),
        Step(COMPUTE, 2, 0),
    ]
    counts = residency.counts
    assert (counts.needed, counts.hosted, counts.missed, counts.loads) == (3, 2, 1, 1)
    residency.policy.ahead = [5]  # type: ignore[attr-defined]
    assert residency.event(event([2]))[-1] == Step(PREFETCH, 5, 1)
    assert residency.event(event([1], layer=1))[-1] == Step(StepKind.HOST, 9, -1)  # nothing on the device


def test_experts_come_and_go_outside_of_events() -> None:
    policy = Scripted(3)
    residency = Residency(policy)
    first = residency.load_into_free_slot(5)
    assert first == Step(LOAD, 5, residency.slot_of[5])
    assert residency.load_into_free_slot(5) is None  # it is there
    assert residency.event(event([5, 6]))[0] == Step(LOAD, 6, residency.slot_of[6])
    assert residency.counts.kept == 1 and residency.counts.missed == 1
    residency.load_into_free_slot(7)
    assert (
        residency.load_into_free_slot(8) is None and 8 not in residency.slot_of
    )  # no slot is free, and nobody has to go
    slot = residency.slot_of[6]
    residency.forget(6)
    residency.forget(6)
    assert policy.queue == [5, 7]
    assert residency.load_into_free_slot(8) == Step(LOAD, 8, slot)
    assert [step.kind for step in residency.event(event([0], layer=1))] == [COMPUTE]
    assert residency.counts.loads == 1  # what came from outside is not counted
