"""SMoE against the algorithm worked by hand, against brute force, and the rule for alpha."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base.errors import MismatchError, UsageError
from moetool.base.families import require_substitutable
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.caching.host_split import HostCosts, two_pointers
from moetool.caching.policies import smoe
from moetool.caching.policy import PartialCosts, build_policy
from moetool.caching.residency import Residency, StepKind
from moetool.tuning.replay import ReplaySetup, replay
from tests import traces
from tests.refusals import refused
from tests.synthetic import make_spec, random_stream, run_forwards


def event_of(
    spec: ModelSpec,
    scores_TE: object,
    layer: int = 0,
    *,
    ahead: object = None,
    experts: object = None,
    phases: tuple[Phase, ...] | None = None,
) -> GateEvent:
    """An event of tokens with these scores; their experts are the highest unless given."""
    scores = np.asarray(scores_TE, np.float32)
    num_tokens = len(scores)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : spec.top_k_L[layer]] if experts is None else experts
    info = ForwardInfo(
        forward_id=0,
        request_T=tuple(range(num_tokens)),
        phase_T=phases or (Phase.DECODE,) * num_tokens,
        position_T=(7,) * num_tokens,
    )
    return GateEvent(
        forward=info,
        layer=layer,
        experts_TK=tuple(map(tuple, np.asarray(chosen).tolist())),
        scores_TE=scores,
        ahead_ATE=None if ahead is None else np.asarray(ahead, np.float32)[None],
    )


def routed(scores: list[list[float]], here: set[int], alpha: float, top_k: int = 3) -> list[list[int]] | None:
    spec = make_spec(layers=1, experts=len(scores[0]), top_k=top_k)
    here_E = np.array([expert in here for expert in range(len(scores[0]))])
    return smoe.cache_router(spec, event_of(spec, scores), here_E, alpha)


# S is the score of expert 3: 10. At alpha 0.3 top-score is from 13 on, low-score below; candidates are above 7.
ONE = [[20.0, 12.0, 11.0, 10.0, 9.0, 8.0, 6.0, 1.0]]


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({1, 2, 3, 4}, None),  # low-score experts that are resident stay
        ({3, 4, 5}, [[0, 3, 4]]),  # both are missing: the best candidate stands for the higher of them
        ({2, 4, 5}, [[0, 4, 2]]),  # one is: the best candidate for it
        ({5}, [[0, 1, 5]]),  # one candidate for two: the lower gives way, the higher is loaded
        ({6, 7}, None),  # 6 and 1 are below the band
        (set(), None),
        ({0, 3}, [[0, 1, 3]]),  # the top-score expert counts for nothing, resident or not
    ],
)
def test_one_token_by_hand(here: set[int], expected: list[list[int]] | None) -> None:
    assert routed(ONE, here, 0.3) == expected


def test_bands_are_open_and_closed_where_the_reading_says() -> None:
    edge = [[15.0, 12.0, 11.0, 8.0, 4.0, 3.0]]  # S is 8; at alpha 0.5 top-score is from 12 on, candidates above 4
    assert routed(edge, {4, 5}, 0.5) is None
    assert routed(edge, {3, 4, 5}, 0.5) == [[0, 1, 3]]  # 12 stays, 11 goes
    assert routed(edge, {3, 4}, 0.625) == [[0, 3, 4]]  # 12 < 13: now both go, for 8 and 4 > 3


def test_top_score_experts_of_other_tokens_count_as_resident() -> None:
    scores = [
        [20.0, 12.0, 11.0, 10.0, 9.0, 8.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0, 30.0, 20.0, 11.0, 10.0],
    ]  # the second token's C is {4, 5}; its low-score expert 6 finds nobody: 0 is no candidate of its band
    assert routed(scores, set(), 0.3) == [[0, 4, 5], [4, 5, 6]]
    scores[1][:3] = 1.0, 30.0, 1.0  # 1 is in C of the second token and stays in the first
    assert routed(scores, set(), 0.3) == [[0, 1, 4], [1, 4, 5]]


def test_a_missing_low_score_expert_of_another_token_counts_for_nothing() -> None:
    scores = [[20.0, 12.0, 11.0, 10.0, 1.0, 1.0], [20.0, 1.0, 1.0, 12.0, 11.0, 10.0]]  # its 3 and 4 are low and missing
    assert routed(scores, set(), 0.3) is None
    assert routed(scores, {3}, 0.3) == [[0, 1, 3], [0, 3, 4]]


def test_what_the_router_chose_by_other_means_stays_outside_the_band() -> None:
    spec = make_spec(layers=1, experts=6, top_k=2)
    event = event_of(spec, [[9.0, 8.0, 7.0, 6.0, 5.0, 1.0]], experts=[[5, 2]])  # S is 7: 5 is far below it, 2 on it
    here_E = np.array([True] * 5 + [False])
    assert smoe.cache_router(spec, event, here_E, 0.3) is None
    here_E[2] = False
    assert smoe.cache_router(spec, event, here_E, 0.3) == [[5, 3]]


def test_only_groups_that_the_token_uses_have_candidates() -> None:
    spec = replace(make_spec(layers=1, experts=8, top_k=2), num_groups=2)
    event = event_of(spec, [[20.0, 11.0, 10.0, 9.0, 10.5, 10.4, 10.3, 10.2]])
    assert smoe.cache_router(spec, event, np.arange(8) != 1, 0.3) == [[0, 2]]


tokens = st.lists(
    st.lists(st.integers(1, 40), min_size=9, max_size=9).map(lambda row: [float(x) for x in row]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(scores=tokens, here=st.sets(st.integers(0, 8)), alpha=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]))
def test_substitution_keeps_its_promises(scores: list[list[float]], here: set[int], alpha: float) -> None:
    top_k = 3
    before = np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :top_k].tolist()
    after = routed(scores, here, alpha, top_k)
    if alpha == 0:
        assert after is None
    after = before if after is None else after
    limit = [sorted(row, reverse=True)[top_k] for row in scores]
    top = {e for row, s, lim in zip(before, scores, limit, strict=True) for e in row if s[e] >= (1 + alpha) * lim}
    for old, new, score, lim in zip(before, after, scores, limit, strict=True):
        assert len(set(new)) == top_k
        left = {e for e in range(9) if e not in new and e in here | top and (1 - alpha) * lim < score[e] <= lim} - {
            *old
        }
        for out, into in zip(old, new, strict=True):
            if out != into:
                assert score[out] < (1 + alpha) * lim and out not in here | top
                assert into in here | top and (1 - alpha) * lim < score[into] <= lim
                assert all(score[into] >= score[e] for e in left)
            elif left:  # somebody could have stood for it
                assert out in here | top or score[out] >= (1 + alpha) * lim


def test_without_alpha_nothing_is_routed() -> None:
    spec = make_spec(layers=1, experts=8, top_k=3)
    made = build_policy("smoe", spec, {"alpha": 0}, 6)
    assert made.route(event_of(spec, ONE), lambda key: key in (3, 4, 5)) is None
    assert build_policy("smoe", spec, {"alpha": 0.3}, 6).route(event_of(spec, ONE), {3, 4, 5}.__contains__)


@settings(max_examples=30, deadline=None)
@given(window=st.integers(0, 4), seed=st.integers(0, 999))
def test_the_lowest_mean_of_the_last_scores_goes_first(window: int, seed: int) -> None:
    spec = make_spec(layers=2, experts=5, top_k=2)
    made = smoe.ScoreWindow(spec, window)
    draw = np.random.default_rng(seed)
    past: list[list[np.ndarray]] = [[], []]
    residents: set[int] = set()
    for _ in range(12):
        layer = int(draw.integers(2))
        scores_TE = draw.random((3, 5)).astype(np.float32)
        past[layer].append(scores_TE.astype(np.float64).mean(axis=0))
        made.see(event_of(spec, scores_TE, layer))
        key = int(draw.integers(10))
        (made.removed if key in residents else made.admit)(key)
        residents ^= {key}
        kept = set(draw.integers(0, 10, 2).tolist())
        means = {
            key: np.mean([row[key % 5] for row in past[key // 5][-window - 1 :]]) if past[key // 5] else 0.0
            for key in residents - kept
        }
        expected = min(sorted(means), key=means.__getitem__) if means else None
        assert made.lowest(kept) == expected


def test_new_tokens_count_before_those_of_prompts() -> None:
    spec = make_spec(layers=1, experts=4, top_k=1)
    made = smoe.ScoreWindow(spec, 0)
    scores = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
    made.see(event_of(spec, scores, phases=(Phase.PREFILL, Phase.DECODE)))
    assert made.mean(3) == pytest.approx(0.4)
    made.see(event_of(spec, scores, phases=(Phase.PREFILL, Phase.PREFILL)))
    assert made.mean(3) == pytest.approx(0.25)


def test_only_predicted_top_scores_are_prefetched_and_evict_only_lower_ones() -> None:
    spec = make_spec(layers=2, experts=6, top_k=2)
    ahead = [[0.5, 0.21, 0.2, 0.05, 0.03, 0.01]]  # S is 0.2: at alpha 0.3 only expert 0 is top-score
    event = event_of(spec, [[0.1, 0.1, 0.1, 0.1, 0.2, 0.4]], ahead=ahead)
    for alpha, expected in ((0.3, [6]), (0.04, [6, 7]), (0.0, [6, 7])):
        assert build_policy("smoe", spec, {"alpha": alpha}, 4).after_first_expert(event) == expected
    assert build_policy("smoe", spec, {"prefetch": False}, 4).after_first_expert(event) == ()
    partial = replace(event, resident_TE=np.array([[0.1, 0.1, 0.1, 0.4, 0.2, 0.1]], np.float32))
    other = build_policy("smoe", spec, {"predict_from": "resident"}, 4)
    assert other.columns == {"experts", "logits", "resident"}
    assert other.after_first_expert(partial) == [9, 10]
    residency = Residency(build_policy("smoe", spec, {"alpha": 0.0}, 3))
    residency.begin_forward(event.forward)
    steps = residency.event(event)
    assert [(step.kind, step.key) for step in steps if step.kind != StepKind.COMPUTE] == [
        (StepKind.LOAD, 4),
        (StepKind.LOAD, 5),
        (StepKind.PREFETCH, 6),  # into the free slot; 4 and 5 are shielded, so 7 finds no room
    ]


@pytest.mark.parametrize("spare", [False, True])
def test_a_prefetch_spares_higher_mean_scores_only_if_asked(spare: bool) -> None:
    spec = make_spec(layers=2, experts=6, top_k=2)
    policy = build_policy("smoe", spec, {"alpha": 0.0, "evict_lower_only": spare}, 4)
    event = event_of(spec, [[0.05, 0.1, 0.1, 0.05, 0.3, 0.4]], ahead=[[0.5, 0.08, 0.2, 0.1, 0.07, 0.05]])
    policy.gate(event, [], [])
    policy.admit(4, False)
    policy.after_last_expert(event)
    assert policy.after_first_expert(event) == [6, 8]
    assert policy.evict_for_prefetch(6, ()) == 4  # 0.5 is above the mean of 0.3
    assert policy.evict_for_prefetch(8, ()) == (None if spare else 4)  # 0.2 is not


@pytest.mark.parametrize("count", range(1, 9))
def test_the_split_by_finish_is_the_shortest_and_the_printed_one_within_an_expert(count: int) -> None:
    for load, host in product([1.0, 2.0, 3.0, 7.0], repeat=2):
        lengths = [max(n * load, (count - n) * host) for n in range(count + 1)]
        best, printed = (two_pointers([host] * count, load, finish=finish) for finish in (True, False))
        assert lengths[best] == min(lengths)
        assert lengths[printed] <= min(lengths) + max(load, host)


def test_algorithm_2_by_hand() -> None:
    # link 3, host 1: load (3, 0), then the host catches up (3, 1), (3, 2), (3, 3), (3, 4): then the link again
    assert two_pointers([1.0] * 6, 3.0, finish=False) == 2
    assert two_pointers([1.0] * 6, 3.0, finish=True) == 1  # 3 against 5, and with two 6 against 4
    assert two_pointers([], 3.0, finish=False) == 0
    assert two_pointers([9.0, 9.0], 1.0, finish=True) == 2


def test_misses_of_the_highest_scores_are_loaded_and_the_others_computed_on_the_host() -> None:
    spec = make_spec(layers=1, experts=6, top_k=4)
    event = event_of(spec, [[0.4, 0.1, 0.2, 0.15, 0.1, 0.05]])
    made = build_policy("smoe", spec, {"load_s": 1.0, "host_s": 1.0}, 5)
    assert made.computes_on_host and sorted(made.on_host(event, [0, 1, 2, 3])) == [1, 3]
    assert sorted(made.on_host(event, [1, 2, 3])) == [1]
    assert not build_policy("smoe", spec, {}, 5).computes_on_host
    residency = Residency(made)
    residency.begin_forward(event.forward)
    steps = residency.event(event)
    assert [step.key for step in steps if step.kind == StepKind.HOST] == [1, 3]
    assert (residency.counts.hosted, residency.counts.missed) == (2, 2)


def test_costs_that_are_none_are_refused() -> None:
    assert HostCosts(load_s=1, host_s=2, host_token_s=3).seconds(4) == 11
    for wrong in ({"load_s": 1.0}, {"host_s": 1.0}, {"load_s": -1.0, "host_s": 1.0}):
        with refused(UsageError, "load_s", "host_s"):
            HostCosts(**wrong)
    with refused(UsageError, "alpha"):
        smoe.Options(alpha=1.5)


def test_the_smallest_alpha_that_is_fast_enough() -> None:
    alphas = [0.0, 0.2, 0.4, 0.6]
    assert smoe.choose_alpha(alphas, [10.0, 8.0, 6.0, 4.0], 7.0) == pytest.approx(0.3, abs=1e-3)
    assert smoe.choose_alpha(alphas, [10.0, 8.0, 6.0, 4.0], 99.0) == 0.0
    squares = [1 + (0.6 - alpha) ** 2 for alpha in alphas]
    assert smoe.choose_alpha(alphas, squares, 1.04) == pytest.approx(0.4, abs=1e-3)
    with refused(UsageError, 4):
        smoe.choose_alpha(alphas, [10.0, 8.0, 6.0, 4.0], 3.0)
    with refused(UsageError, "too few", "curve"):
        smoe.choose_alpha([0.1], [1.0], 3.0)


def test_only_what_it_looks_at_is_asked_of_a_trace(tmp_path: Path) -> None:
    lengths = [(3, 4), (2, 3)]
    trace = traces.write(tmp_path / "trace", traces.together(lengths), lengths, keep=("topk", "logits"))
    budget = [6 * trace.spec.slot_bytes]
    (row,) = replay(trace, ["smoe"], budget, ReplaySetup(options={"smoe": {"prefetch": False}}))
    assert row.counts.needed > 0 and row.counts.prefetch_loads == 0
    for look in ("ahead", "resident"):
        with pytest.raises(MismatchError, match=f"smoe needs {look}"):
            replay(trace, ["smoe"], budget, ReplaySetup(options={"smoe": {"predict_from": look}}))


def test_models_without_substitutes_are_refused(tmp_path: Path) -> None:
    spec = make_spec()
    with refused(UsageError, "scores", "router"):
        build_policy("smoe", replace(spec, has_logits_L=(True, False, True)), {}, 4)
    for family in ("phimoe", "llama4_text", "gemma4_text"):
        with pytest.raises(UsageError, match=f"smoe .* {family} does not allow"):
            require_substitutable(f"{family}:tiny", "smoe")
    require_substitutable("synthetic", "smoe")
    require_substitutable("qwen3_moe:x", "smoe")
    lengths = [(3, 2)]
    trace = traces.write(tmp_path / "trace", traces.alone(lengths), lengths)
    trace.spec = replace(trace.spec, name="phimoe:tiny")
    with refused(UsageError, "sparsemixer"):
        replay(trace, ["smoe"], [6 * trace.spec.slot_bytes])


@settings(max_examples=15, deadline=None)
@given(slots=st.integers(2, 20), seed=st.integers(0, 99), alpha=st.sampled_from([0.1, 0.5, 1.0]))
def test_programs_are_legal_after_routing(slots: int, seed: int, alpha: float) -> None:
    """Substitution, prefetching and the host together: every expert of the routed event is computed once."""
    spec = make_spec(layers=3, experts=8, top_k=3)
    costs = {"load_s": 2.0, "host_s": 1.0}
    residency = Residency(build_policy("smoe", spec, {"alpha": alpha, **costs}, slots))
    for info, events in random_stream(spec, num_requests=2, prompt_tokens=4, new_tokens=8, seed=seed):
        residency.begin_forward(info)
        for event in events:
            if (chosen := residency.route(event)) is not None:
                event = replace(event, experts_TK=tuple(map(tuple, chosen)))
            steps = residency.event(event)
            done = sorted(step.key for step in steps if step.kind in (StepKind.COMPUTE, StepKind.HOST))
            assert done == [spec.expert_key(event.layer, expert) for expert in event.needed]
        residency.end_forward(info)
    assert residency.counts.hosted or slots > 6


@pytest.mark.parametrize("policy", ["smoe", "hybrimoe"])
def test_a_host_that_is_switched_off_computes_nothing(policy: str) -> None:
    spec = make_spec(experts=8, top_k=4)
    hosted = []
    for host in (True, False):
        options = {"load_s": 4.0, "host_s": 1.0, "host": host}
        residency = Residency(build_policy(policy, spec, options, 9))
        run_forwards(
            residency, random_stream(spec, num_requests=1, prompt_tokens=0, new_tokens=9, seed=3, signals=True)
        )
        hosted.append(residency.counts.hosted)
    assert hosted[0] > 0 == hosted[1]


@pytest.mark.parametrize(
    ("share", "layer_s", "chosen"),
    [(0.25, 7e-3, "resident"), (0.25, 7.6e-3, "ahead"), (0.5, 7e-3, "ahead"), (0.5, 4e-3, "resident")],
)
def test_beside_a_gpu_it_predicts_as_the_paper_where_loads_take_longer(
    share: float, layer_s: float, chosen: str
) -> None:
    """Ten experts a token, 1 ms each: 7.5 ms of loads with a quarter of them resident, 5 ms with half."""
    spec = make_spec(4, 20, 10)
    slots = round(share * spec.total_experts)
    measured = PartialCosts(load_s=1e-3, layer_s=layer_s)
    options = smoe.Policy.beside_gpu(spec, {"alpha": 0.2}, slots, lambda: measured)
    assert options == {"alpha": 0.2, "predict_from": chosen}
    assert chosen in build_policy("smoe", spec, options, slots).columns
    assert smoe.Policy.beside_gpu(spec, {"alpha": 0.2}, slots, lambda: None) == {"alpha": 0.2}

    def unasked() -> PartialCosts:
        raise AssertionError

    for wish in ({"predict_from": "ahead"}, {"predict_from": "resident"}, {"prefetch": False}):
        assert smoe.Policy.beside_gpu(spec, wish, slots, unasked) == wish
    assert "ahead" in build_policy("smoe", spec, {}, slots).columns  # on a CPU, and in a replay
