"""HybriMoE's running scores, its prefetches by gain and its sharing of a layer, by hand."""

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency, StepKind
from tests.refusals import refused
from tests.synthetic import make_spec


def event_of(spec: ModelSpec, scores_TE: object, layer: int = 0, ahead_ATE: object = ()) -> GateEvent:
    scores = np.asarray(scores_TE, np.float32)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : spec.top_k_L[layer]]
    count = len(scores)
    info = ForwardInfo(forward_id=0, request_T=(0,) * count, phase_T=(1,) * count, position_T=tuple(range(count)))
    ahead = np.asarray(ahead_ATE, np.float32).reshape(-1, count, spec.num_experts)
    return GateEvent(
        forward=info,
        layer=layer,
        experts_TK=tuple(map(tuple, chosen.tolist())),
        scores_TE=scores,
        ahead_ATE=ahead,
    )


def test_the_lowest_running_score_goes_and_only_twice_k_count() -> None:
    spec = make_spec(layers=1, experts=5, top_k=1)
    made = build_policy("hybrimoe", spec, {"alpha": 0.5}, 4)
    for key in range(4):
        made.admit(key, False)
    made.gate(event_of(spec, [[0.4, 0.3, 0.2, 0.1, 0.0]]), [], [])  # running: 0.2, 0.15 and nothing for the others
    assert made.evict(()) == 2
    assert made.evict({2, 3}) == 1
    made.gate(event_of(spec, [[0.0, 0.1, 0.5, 0.4, 0.0]]), [], [])  # 0.1, 0.075, 0.25, 0.2
    assert made.evict(()) == 1
    made.gate(event_of(spec, [[0.0, 0.1, 0.5, 0.4, 0.0]]), [1], [])  # what the event needs goes last
    assert made.evict(()) == 0
    assert made.evict({0, 2, 3}) == 1


def test_the_running_score_is_the_published_one() -> None:
    """S <- alpha TopP(s) + (1 - alpha) S, alpha 0.5, P = 2k: by hand, and in the order in which experts go."""
    spec = make_spec(layers=1, experts=4, top_k=1)
    made = build_policy("hybrimoe", spec, {}, 4)
    events = ([0.5, 0.3, 0.15, 0.05], [0.1, 0.3, 0.4, 0.2], [0.25, 0.05, 0.1, 0.6])
    score_E = np.zeros(4)
    for scores in events:
        made.gate(event_of(spec, [scores]), [], [])
        top = np.zeros(4)
        highest = np.argsort(scores)[-2:]
        top[highest] = np.array(scores)[highest]
        score_E = 0.5 * top + 0.5 * score_E
    assert score_E.tolist() == pytest.approx([0.1875, 0.1125, 0.1, 0.3])
    made.after_last_expert(event_of(spec, [events[-1]]))
    for key in range(4):
        made.admit(key, False)
    gone: set[int] = set()
    for _ in range(4):
        gone.add(made.evict(gone))
        assert gone == set(np.argsort(score_E)[: len(gone)].tolist())


def test_without_costs_every_miss_gains_the_same_and_the_nearer_layer_goes_first() -> None:
    spec = make_spec(layers=4, experts=4, top_k=2)
    made = build_policy("hybrimoe", spec, {"distance": 2}, 6)
    made.admit(4 + 1, False)
    ahead = [[[0.1, 0.5, 0.3, 0.1]], [[0.2, 0.1, 0.1, 0.6]], [[0.9, 0.1, 0.0, 0.0]]]
    assert made.after_first_expert(event_of(spec, [[0.4, 0.3, 0.2, 0.1]], 0, ahead)) == [4 + 2, 8 + 3, 8 + 0]


@pytest.mark.parametrize("spare", [False, True])
def test_a_prefetch_spares_higher_scores_only_if_asked(spare: bool) -> None:
    spec = make_spec(layers=2, experts=4, top_k=2)
    made = build_policy("hybrimoe", spec, {"evict_lower_only": spare}, 4)
    event = event_of(spec, [[0.4, 0.3, 0.2, 0.1]], 0, [[[0.1, 0.5, 0.25, 0.15]]])
    made.gate(event, [], [])
    made.admit(0, False)  # S is 0.2
    made.after_last_expert(event)
    assert made.after_first_expert(event) == [4 + 1, 4 + 2]
    made.gate(event, [], [])  # S is 0.3
    made.after_last_expert(event)
    assert made.evict_for_prefetch(4 + 1, ()) == 0  # 0.5 is more
    assert made.evict_for_prefetch(4 + 2, ()) == (None if spare else 0)  # 0.25 is not


def test_with_costs_the_layer_that_gets_shortest_goes_first() -> None:
    spec = make_spec(layers=3, experts=8, top_k=4)
    made = build_policy("hybrimoe", spec, {"load_s": 4.0, "host_s": 1.0}, 9)
    near, far = np.arange(8, 0, -1) / 36, np.arange(1, 9) / 36
    made.admit(8 + 0, False)
    made.admit(8 + 1, False)  # two misses are left there: 2 s of the host, 1 s with one of them gone
    # four misses in the layer beyond: 4 s on either side, 3 s with one of them gone, and so on
    wanted = made.after_first_expert(event_of(spec, [np.full(8, 0.125)], 0, [[near], [far]]))
    assert wanted == [8 + 2, 8 + 3, 16 + 7, 16 + 6, 16 + 5, 16 + 4]
    slow = build_policy("hybrimoe", spec, {"load_s": 2.0, "host_s": 2.0}, 9)
    slow.admit(8 + 0, False)
    slow.admit(8 + 1, False)  # two misses, one on each side: one gone shortens nothing, both save 2 s, 1 s a load
    wanted = slow.after_first_expert(event_of(spec, [np.full(8, 0.125)], 0, [[near], [far]]))
    assert wanted == [8 + 2, 8 + 3, 16 + 7, 16 + 6, 16 + 5, 16 + 4]
    plateau = build_policy("hybrimoe", spec, {"load_s": 2.0, "host_s": 3.0}, 9)
    plateau.admit(8 + 0, False)
    plateau.admit(8 + 1, False)  # 3 s with two misses, 2 s with one, and the likelier one goes first
    assert list(plateau.after_first_expert(event_of(spec, [np.full(8, 0.125)], 0, [[near]])))[:2] == [8 + 2, 8 + 3]


def test_the_host_gets_what_the_fewest_tokens_use() -> None:
    spec = make_spec(layers=1, experts=4, top_k=2)
    scores = [[0.5, 0.4, 0.1, 0.0], [0.5, 0.0, 0.4, 0.1], [0.6, 0.3, 0.1, 0.0]]  # three use 0, two 1, one 2
    event = event_of(spec, scores)
    made = build_policy("hybrimoe", spec, {"load_s": 1.0, "host_s": 1.0}, 3)
    residency = Residency(made)
    residency.begin_forward(event.forward)
    steps = residency.event(event)
    assert [(step.kind, step.key) for step in steps if step.kind != StepKind.COMPUTE] == [
        (StepKind.HOST, 2),
        (StepKind.LOAD, 0),
        (StepKind.LOAD, 1),
    ]
    costly = build_policy("hybrimoe", spec, {"load_s": 1.0, "host_s": 1.0, "host_token_s": 9.0}, 3)
    assert costly.on_host(event, [0, 1]) == []
    assert not build_policy("hybrimoe", spec, {}, 3).computes_on_host


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"distance": 0}, {"alpha": 0.0}, {"alpha": 1.1}):
        with refused(UsageError, "hybrimoe"):
            build_policy("hybrimoe", make_spec(layers=1, experts=4, top_k=2), wrong, 4)
