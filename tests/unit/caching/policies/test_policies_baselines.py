"""Loads and evictions of each published baseline, on small hand-made streams."""

from typing import Any

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.caching.policy import Policy, build_policy
from moetool.caching.residency import Residency, Step, StepKind
from tests.refusals import refused
from tests.synthetic import make_forward, make_spec, random_stream

COMPUTE, LOAD, PREFETCH = StepKind.COMPUTE, StepKind.LOAD, StepKind.PREFETCH


class Run:
    """A policy over a pool, driven a token at a time."""

    def __init__(self, name: str, spec: ModelSpec, slots: int, **options: Any) -> None:
        self.spec = spec
        self.policy: Policy = build_policy(name, spec, options, slots)
        self.residency = Residency(self.policy)
        self._forwards = 0

    def token(self, *experts_LK: tuple[int, ...], request: int = 0) -> list[list[Step]]:
        """One new token that uses these experts; gives the steps before the first layer, then each layer's."""
        return self.forward(*make_forward(self.spec, np.array([experts_LK]), request=request))

    def forward(self, info: ForwardInfo, events: list[GateEvent]) -> list[list[Step]]:
        steps = [self.residency.begin_forward(info), *map(self.residency.event, events)]
        self.residency.end_forward(info)
        return steps

    def end(self, request: int) -> None:
        self.residency.end_request(request)


def loaded(steps: list[Step]) -> list[int]:
    return [step.key for step in steps if step.kind != COMPUTE]


def test_layerwise_loads_the_whole_layer_before_it_computes() -> None:
    run = Run("layerwise", make_spec(layers=2, experts=4, top_k=2), 4)
    first, *layers = run.token((1, 3), (0, 2))
    assert first == []
    assert layers[0] == [
        *(Step(LOAD, 1, 0), Step(LOAD, 3, 1)),
        *(Step(LOAD, 0, 2), Step(LOAD, 2, 3)),
        *(Step(COMPUTE, 1, 0), Step(COMPUTE, 3, 1)),
    ]
    assert sorted(step.evicted for step in layers[1] if step.kind == LOAD) == [0, 1, 2, 3]
    counts = run.residency.counts
    assert (counts.missed, counts.prefetch_loads, counts.wasted) == (4, 4, 2)


@pytest.mark.parametrize(("slots", "hits"), [(4, 0), (8, 0), (10, 2), (12, 4)])
def test_layerwise_hits_only_what_the_pool_holds_beyond_the_other_layers(slots: int, hits: int) -> None:
    run = Run("layerwise", make_spec(layers=3, experts=4, top_k=4), slots)
    for _ in range(2):
        before = run.residency.counts
        run.token(*[(0, 1, 2, 3)] * 3)
    assert run.residency.counts.kept - before.kept == 3 * hits


def test_layerwise_keeps_the_layer_at_hand_even_where_it_is_not_needed() -> None:
    run = Run("layerwise", make_spec(layers=3, experts=4, top_k=1), 10)
    for token in range(6):
        steps = run.token(*[(token % 4,)] * 3)
        for layer in range(3):
            evicted = {step.evicted // 4 for step in steps[1 + layer] if step.evicted >= 0}
            assert layer not in evicted


def test_moesys_fetches_the_next_layer_while_one_computes_and_gives_up_the_one_that_is_done() -> None:
    run = Run("moesys", make_spec(layers=3, experts=2, top_k=1), 6)
    assert run.residency.num_slots == 4  # more than two layers are of no use to it
    assert run.token((1,), (0,), (0,)) == [
        [Step(PREFETCH, 0, 0), Step(PREFETCH, 1, 1)],
        [Step(COMPUTE, 1, 1), Step(PREFETCH, 2, 2), Step(PREFETCH, 3, 3)],
        [Step(COMPUTE, 2, 2), Step(PREFETCH, 4, 1), Step(PREFETCH, 5, 0)],
        [Step(COMPUTE, 4, 1)],
    ]
    assert run.residency.slot_of == {}


def test_moesys_never_misses_and_moves_every_expert_in_every_forward() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    run = Run("moesys", spec, 16)
    stream = list(random_stream(spec, num_requests=2, prompt_tokens=5, new_tokens=4, seed=0))
    for info, events in stream:
        run.forward(info, events)
    counts = run.residency.counts
    assert counts.hit_rate == 1
    assert counts.loads == len(stream) * spec.total_experts
    assert counts.wasted == counts.loads - counts.needed


def test_moesys_needs_its_two_widest_neighbours() -> None:
    uneven = make_spec(layers=3, experts=8)
    object.__setattr__(uneven, "num_experts_L", (8, 2, 4))
    kind = type(Run("moesys", make_spec(), 16).policy)
    assert kind.min_slots(uneven, None) == 10
    assert kind.min_slots(make_spec(layers=1, experts=8), None) == 8


def test_static_split_keeps_the_first_layers_and_leaves_the_others_to_the_host() -> None:
    run = Run("static_split", make_spec(layers=3, experts=2, top_k=2), 3)
    assert run.residency.num_slots == 2
    first, *layers = run.token((0, 1), (0, 1), (0, 1))
    assert first == [Step(PREFETCH, 0, 0), Step(PREFETCH, 1, 1)]
    assert layers[0] == [Step(COMPUTE, 0, 0), Step(COMPUTE, 1, 1)]
    assert layers[1] == [Step(StepKind.HOST, 2, -1), Step(StepKind.HOST, 3, -1)]
    first, *layers = run.token((0, 1), (0, 1), (0, 1))
    assert first == [] and all(step.kind in (COMPUTE, StepKind.HOST) for steps in layers for step in steps)
    assert set(run.residency.slot_of) == {0, 1}
    assert (run.residency.counts.hosted, run.residency.counts.missed) == (8, 0)


@pytest.mark.parametrize(("slots", "used"), [(2, 2), (7, 2), (8, 8), (15, 8), (16, 16), (23, 16), (24, 24)])
def test_static_split_uses_whole_layers(slots: int, used: int) -> None:
    spec = make_spec(layers=3, experts=8)
    assert Run("static_split", spec, slots).residency.num_slots == used


def moe_infinity(slots: int = 32, *, layers: int = 4, **options: int) -> Run:
    return Run("moe_infinity", make_spec(layers=layers, experts=8, top_k=1), slots, **options)


def test_moe_infinity_prefetches_what_the_most_similar_earlier_request_used() -> None:
    run = moe_infinity(6)
    for request, expert in ((0, 1), (1, 5)):
        assert all(step.kind != PREFETCH for steps in run.token(*[(expert,)] * 4, request=request) for step in steps)
        run.end(request)
    run.policy.begin_forward(make_forward(run.spec, np.zeros((1, 4, 1), int))[0])  # requests join with a forward
    for expert, other in ((1, 5), (5, 1)):
        assert loaded_ahead(run, request=2 + expert, first=expert) == [8 + expert, 16 + expert, 24 + expert]
        assert 8 + other not in loaded_ahead(run, request=12 + expert, first=expert)


def loaded_ahead(run: Run, *, request: int, first: int) -> list[int]:
    """The policy's prefetches after the first layer of a new request's first token."""
    _, events = make_forward(run.spec, np.full((1, run.spec.num_layers, 1), first), request=request)
    run.policy.begin_request(request)
    run.policy.gate(events[0], [], [first])
    return list(run.policy.after_first_expert(events[0]))


def test_moe_infinity_looks_as_far_as_it_is_told_and_weighs_near_layers_more() -> None:
    run = moe_infinity(distance=2)
    for experts in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 4, 2, 3)):  # layer 1: 1 with 2/3, 4 with 1/3; layers 2, 3 surely
        run.token(*[(e,) for e in experts])
    run.end(0)
    run.token((7,), (7,), (7,), (7,), request=9)
    assert loaded_ahead(run, request=1, first=0) == [16 + 2, 8 + 1]  # 1 * 3/5 comes before 2/3 * 4/5


def test_moe_infinity_fetches_the_most_used_experts_of_the_first_layer() -> None:
    run = moe_infinity(2, layers=2)
    for expert in (3, 3, 5):
        run.token((expert,), (0,))
    first, *_ = run.token((5,), (1,))
    assert loaded(first) == [3]  # K experts for each of the forward's tokens


@pytest.mark.parametrize("spare", [False, True])
def test_moe_infinity_evicts_the_least_often_used_and_last_what_it_fetched_ahead(spare: bool) -> None:
    run = moe_infinity(3, layers=2, evict_lower_only=spare)
    for _ in range(3):
        run.token((0,), (0,))
    run.token((1,), (0,))
    assert set(run.residency.slot_of) == {0, 1, 8}  # uses 3, 1, 4
    run.token((2,), (0,))
    assert set(run.residency.slot_of) == {0, 2, 8}
    policy = run.policy
    policy.admit(9, True)  # fetched ahead for layer 1, never used
    assert policy.evict({0}) != 9
    assert (policy.evict_for_prefetch(15, set()) is None) == spare  # never used itself: worth no expert that was


def test_moe_infinity_forgets_the_request_that_matched_least() -> None:
    run = moe_infinity(history=2)
    policy: Any = run.policy
    for request, expert in enumerate((1, 2)):
        run.token(*[(expert,)] * 4, request=request)
        run.end(request)
    run.token(*[(1,)] * 4, request=2)  # matches the first
    run.end(2)
    run.token(*[(3,)] * 4, request=3)  # as it begins, request 2 takes the place of the second
    assert policy.matrices.num_past == 2
    assert [int(policy.matrices.past_HLE[i, 0].argmax()) for i in range(2)] == [1, 1]
    assert set(policy.matrices.running) == {3}


def test_moe_infinity_tells_requests_apart_and_learns_them_in_one_order() -> None:
    def learn(ends: tuple[int, int]) -> Any:
        run = moe_infinity()
        info = ForwardInfo(forward_id=0, request_T=(0, 1), phase_T=(Phase.DECODE,) * 2, position_T=(0, 0))
        layers = [GateEvent(forward=info, layer=i, experts_TK=((1,), (5,))) for i in range(4)]
        run.forward(info, layers)
        for request in ends:
            run.end(request)
        run.token((1,), (1,), (1,), (1,), request=2)
        return run.policy

    policy, other = learn((0, 1)), learn((1, 0))
    assert np.array_equal(policy.matrices.past_HLE, other.matrices.past_HLE)
    assert [policy.matrices.past_HLE[i, 0].nonzero()[0].tolist() for i in range(2)] == [[1], [5]]


def test_moe_infinity_matches_are_cosines_of_the_matrices_so_far() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    run = Run("moe_infinity", spec, 6, history=3)
    policy: Any = run.policy
    ended = 0
    for info, events in random_stream(spec, num_requests=6, prompt_tokens=4, new_tokens=3, seed=3):
        while ended < info.request_T[0]:
            run.end(ended)
            ended += 1
        run.forward(info, events)
        (running,) = policy.matrices.running.values()
        counts = running.counts_LE
        unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
        assert counts.sum() % 6 == 0
        assert np.allclose(running.similarity_HL, (policy.matrices.past_HLE * unit).sum(axis=2), atol=1e-6)
    assert policy.matrices.num_past == 3


def test_moe_infinity_refuses_to_remember_nothing() -> None:
    with refused(UsageError, "moe_infinity", "history", "0", "1"):
        moe_infinity(history=0)
