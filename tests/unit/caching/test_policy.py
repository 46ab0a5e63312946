"""Behaviour of each cache policy that the others lack."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import GateEvent, Phase
from moetool.caching.policies.duoserve import likeliest
from moetool.caching.policy import SharedPredictor, build_policy, slots_within
from moetool.caching.residency import Residency, Step, StepKind
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_forward, make_spec, random_stream, run_forwards

COMPUTE, LOAD, PREFETCH = StepKind.COMPUTE, StepKind.LOAD, StepKind.PREFETCH


def decode(spec, *experts_LK, forward_id: int = 0):  # type: ignore[no-untyped-def]
    """One new token that uses these experts, layer by layer."""
    return make_forward(spec, np.array([experts_LK]), forward_id=forward_id)


@settings(max_examples=50, deadline=None)
@given(
    layers=st.integers(2, 5),
    top_k=st.integers(1, 4),
    share=st.floats(0, 1),
    prompt_tokens=st.integers(0, 9),
    seed=st.integers(0, 1 << 16),
)
def test_lru_hits_nothing_at_batch_1_below_the_cliff(
    layers: int, top_k: int, share: float, prompt_tokens: int, seed: int
) -> None:
    spec = make_spec(layers=layers, experts=8, top_k=top_k)
    most = (layers - 1) * top_k
    if most < 2:
        return
    stream = list(random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=8, seed=seed))
    residency = Residency(build_policy("lru", spec, {}, 2 + round(share * (most - 2))))
    run_forwards(residency, stream)
    assert residency.counts.kept == residency.counts.prefetched == 0
    assert residency.counts.needed > 0


def test_lru_hits_above_the_cliff() -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    token = [(0, 1), (2, 3), (4, 5)]
    for num_slots, hits in ((4, 0), (5, 3), (6, 6)):
        residency = Residency(build_policy("lru", spec, {}, num_slots))
        run_forwards(residency, [decode(spec, *token, forward_id=i) for i in range(2)])
        assert residency.counts.kept == hits


@pytest.mark.parametrize(("layers", "top_k"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_on_demand_never_hits_and_never_overlaps(layers: int, top_k: int) -> None:
    spec = make_spec(layers=layers, experts=4, top_k=top_k)
    stream = list(random_stream(spec, num_requests=2, prompt_tokens=3, new_tokens=6, seed=0))
    residency = Residency(build_policy("on_demand", spec, {}, 12))
    steps = run_forwards(residency, stream)
    assert residency.num_slots == max(2, top_k)
    assert residency.counts.hit_rate == 0
    assert [step.kind for step in steps] == [LOAD, COMPUTE] * residency.counts.needed


def test_lfu_keeps_what_is_used_often_and_of_equals_what_was_used_last() -> None:
    spec = make_spec(layers=1, experts=8, top_k=1)

    def run(experts: str, **options: bool) -> str:
        residency = Residency(build_policy("lfu", spec, options, 2))
        run_forwards(residency, [decode(spec, (int(e),), forward_id=i) for i, e in enumerate(experts)])
        return "".join(map(str, sorted(residency.slot_of)))

    assert run("00012") == "02"  # 1 was used less often than 0
    assert run("012") == "12"  # 0 and 1 as often; 1 later
    assert run("0102") == "02"
    assert run("111022034") == "14"
    assert run("001112203") == "03"  # 0 came back with two uses behind it, or with none
    assert run("001112203", forget=True) == "13"


def test_duoserve_prefetches_the_predicted_experts_once_the_first_is_computed() -> None:
    spec = make_spec(layers=2, experts=8, top_k=2)
    predictor = MadeUpPredictor(spec)
    residency = Residency(build_policy("duoserve", spec, {}, 16, predictor=predictor))
    assert residency.num_slots == 2
    info, events = decode(spec, (0, 1), (6, 7))
    assert residency.begin_forward(info) == []  # nothing is predicted for the first MoE layer
    steps = residency.event(events[0])
    a, b = likeliest(predictor.scores(1), 2)
    assert steps == [
        Step(LOAD, 0, 0),
        Step(LOAD, 1, 1),
        Step(COMPUTE, 0, 0),
        Step(PREFETCH, 8 + a, 0, 0),
        Step(COMPUTE, 1, 1),
        Step(PREFETCH, 8 + b, 1, 1),
    ]
    right = len({a, b} & {6, 7})
    residency.event(events[1])
    assert residency.counts.prefetched == right
    assert residency.counts.missed == 4 - right  # what was predicted wrong is fetched again
    assert residency.counts.prefetch_loads == 2  # and nothing after the last layer


def test_duoserve_pipelines_prompts_without_predicting() -> None:
    spec = make_spec(layers=2, experts=8, top_k=2)
    predictor = MadeUpPredictor(spec)
    residency = Residency(build_policy("duoserve", spec, {}, 16, predictor=predictor))
    info, events = make_forward(spec, np.array([[(0, 1), (0, 1)], [(2, 3), (4, 5)]]), phase=Phase.PREFILL)
    assert residency.begin_forward(info) == [Step(PREFETCH, 0, 0)]
    assert residency.event(events[0]) == [
        Step(LOAD, 1, 1),
        Step(COMPUTE, 0, 0),
        Step(LOAD, 2, 0, 0),  # one is computed while the next is fetched
        Step(COMPUTE, 1, 1),
        Step(LOAD, 3, 1, 1),
        Step(COMPUTE, 2, 0),
        Step(PREFETCH, 8, 0, 2),  # the first expert of the next layer
        Step(COMPUTE, 3, 1),
    ]
    residency.event(events[1])
    residency.end_forward(info)
    assert residency.counts.prefetched == 2
    assert residency.counts.missed == 6
    assert predictor.num_observed == 2  # some predictors remember prompts


@pytest.mark.parametrize("lag", [0, 1, 9])
def test_duoserve_uses_an_answer_at_a_fixed_event_however_long_it_takes(lag: int) -> None:
    spec = make_spec(layers=4, experts=8, top_k=2)
    threads: set[str] = set()

    class Slow(MadeUpPredictor):
        def __init__(self, seconds: float) -> None:
            super().__init__(spec)
            self.seconds, self.lookahead = seconds, 3

        def scores(self, layer: int) -> np.ndarray:
            threads.add(threading.current_thread().name)
            time.sleep(self.seconds)
            return super().scores(layer)

    stream = list(random_stream(spec, num_requests=2, prompt_tokens=2, new_tokens=3, seed=1))
    programs = []
    for predictor in (Slow(0.0), Slow(0.003), SharedPredictor(Slow(0.0))):
        policy = build_policy("duoserve", spec, {"lag": lag, "slots_per_layer": 4}, 16, predictor=predictor)
        assert policy.prediction_lag == min(lag, 2) and policy.distance == 1 + policy.prediction_lag
        programs.append(run_forwards(Residency(policy), stream))
    assert programs[0] == programs[1] == programs[2]
    assert {name.split("_")[0] for name in threads} == {"prediction", threading.current_thread().name}

    asked = MadeUpPredictor(spec)
    policy = build_policy("duoserve", spec, {"lag": lag}, 16, predictor=asked)
    info, events = decode(spec, (0, 1), (2, 3), (4, 5), (6, 7))
    policy.begin_forward(info)
    for event in events:
        policy.gate(event, [], [])
        made, layer = list(policy.after_first_expert(event)), event.layer + 1
        if event.layer < policy.prediction_lag or layer == spec.num_layers:
            assert not made
            continue
        alone = MadeUpPredictor(spec)
        for earlier in events[: event.layer + 1 - policy.prediction_lag]:
            alone.observe(earlier)
        assert made == [spec.expert_key(layer, expert) for expert in likeliest(alone.scores(layer), 2)]


def test_a_predictor_that_fails_beside_the_events_is_heard_of() -> None:
    spec = make_spec(layers=2, experts=8, top_k=2)

    class Broken(MadeUpPredictor):
        def observe(self, event: GateEvent) -> None:
            raise RuntimeError("no more")

    for phase in (Phase.DECODE, Phase.PREFILL):
        residency = Residency(build_policy("duoserve", spec, {}, 16, predictor=Broken(spec)))
        with pytest.raises(RuntimeError, match="no more"):
            run_forwards(residency, [make_forward(spec, np.array([[(0, 1), (2, 3)]]), phase=phase)])


def test_duoserve_gives_up_wrong_predictions_first() -> None:
    spec = make_spec(layers=2, experts=8, top_k=1)

    class Wrong(MadeUpPredictor):
        def scores(self, layer: int) -> np.ndarray:
            return np.eye(8, dtype=np.float32)[[7]]

    policy = build_policy("duoserve", spec, {"slots_per_layer": 1}, 16, predictor=Wrong(spec))
    residency = Residency(policy)
    assert residency.num_slots == 2
    run_forwards(residency, [decode(spec, (0,), (1,))])
    assert set(residency.slot_of) == {0, 9}  # 15 came last and went first


def test_likeliest_is_the_union_by_summed_score() -> None:
    scores = np.array([[0.9, 0.8, 0.0, 0.1], [0.0, 0.7, 0.6, 0.5]], np.float32)
    assert likeliest(scores, 2) == [1, 0, 2]
    assert likeliest(np.zeros((3, 4), np.float32), 2) == [0, 1]


def test_what_cannot_be_built_is_refused_in_one_line() -> None:
    spec = make_spec()
    with refused(UsageError, "lfu"):
        build_policy("lfuu", spec, {}, 4)
    with refused(UsageError, "forgot", "lfu", "forget"):
        build_policy("lfu", spec, {"forgot": True}, 4)
    with refused(UsageError, "duoserve", "slots_per_layer", "integer"):
        build_policy("duoserve", spec, {"slots_per_layer": "many"}, 4)
    with refused(UsageError, "duoserve", "lag", -1, 0):
        build_policy("duoserve", spec, {"lag": -1}, 4, predictor=MadeUpPredictor(spec))
    with refused(UsageError, "predictor"):
        build_policy("duoserve", spec, {}, 4)
    with refused(MismatchError, "synthetic"):
        build_policy("duoserve", spec, {}, 4, predictor=MadeUpPredictor(make_spec(layers=9)))
    with refused(CapacityError, "1,999", 1, "2,000"):
        slots_within(spec, 1999)
    assert slots_within(spec, 1 << 40) == spec.total_experts
