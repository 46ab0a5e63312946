"""The timeline: schedules worked out by hand, and what holds for every run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base import plugins
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.policy import build_policy, policy_class
from moetool.caching.residency import Residency, Step, StepKind
from moetool.costing.costs import CostProfile
from moetool.costing.pricing import Prices, TimelineOptions
from moetool.costing.timeline import MeteredPredictor, Timeline
from moetool.costing.timing import Timing
from tests.profiles import compute, flat, line, make_profile
from tests.refusals import refused
from tests.synthetic import MadeUpPredictor, make_spec, random_stream

SPEC = make_spec(layers=2, experts=8)


def load(key: int, slot: int) -> Step:
    return Step(StepKind.LOAD, key, slot)


def ahead(key: int, slot: int) -> Step:
    return Step(StepKind.PREFETCH, key, slot)


def use(key: int, slot: int) -> Step:
    return Step(StepKind.COMPUTE, key, slot)


def forward(requests: Sequence[int] = (0,), *, prefill: Sequence[bool] = (), start: int = 0) -> ForwardInfo:
    """Tokens of these requests, the tokens of one at ascending positions from `start`."""
    positions = [start + requests[:i].count(request) for i, request in enumerate(requests)]
    phases = prefill or (False,) * len(requests)
    return ForwardInfo(
        forward_id=0,
        request_T=tuple(requests),
        phase_T=tuple(Phase.PREFILL if prompt else Phase.DECODE for prompt in phases),
        position_T=tuple(positions),
    )


def run(
    *layers: Sequence[Step],
    first: Sequence[Step] = (),
    info: ForwardInfo | None = None,
    experts: Sequence[Sequence[int]] | None = None,
    line: Timeline | None = None,
    profile: CostProfile | None = None,
) -> Timeline:
    """Execute one forward's programs; the events need what the programs compute, or `experts` by token and layer."""
    line = line or Timeline(Prices(profile or make_profile(SPEC), SPEC, TimelineOptions()))
    info = info or forward()
    line.begin_forward(info, first)
    for layer, steps in enumerate(layers):
        used = [step.key % 8 for step in steps if step.kind in (StepKind.COMPUTE, StepKind.HOST)]
        rows = experts if experts is not None else [used] * len(info.request_T)
        line.event(GateEvent(forward=info, layer=layer, experts_TK=tuple(map(tuple, rows))), steps)
    line.end_forward(info)
    return line


def spent(made: Timeline) -> tuple[int, int, int, int]:
    """Nanoseconds in all, of compute, of stalls, and of the disk."""
    total = made.timing().total
    return tuple(round(s * 1e9) for s in (total.seconds, total.compute_s, total.stall_s, total.io_s["disk"]))  # type: ignore[return-value]


def test_one_after_the_other_takes_the_sum() -> None:
    made = run([load(0, 0), use(0, 0), load(1, 1), use(1, 1)])
    assert spent(made) == (10 + 3 + 10 + 3, 6, 20, 20)


def test_loads_that_are_started_together_overlap_with_computing() -> None:
    # 0..10 load 0, 10..20 load 1; 10..13 compute 0, wait, 20..23 compute 1
    assert spent(run([load(0, 0), load(1, 1), use(0, 0), use(1, 1)])) == (23, 6, 17, 20)


def test_residents_hide_a_load() -> None:
    made = run([load(0, 0), load(1, 1), use(0, 0), use(1, 1)])
    # 23: load 8 until 33; 23..29 computes the residents, 29..33 waits, 33..36 computes
    assert made.now == 23
    run([load(2, 2), use(0, 0), use(1, 1), use(2, 2)], line=made)
    assert spent(made) == (36, 15, 21, 30)


def test_a_prefetch_in_time_costs_nothing() -> None:
    profile = make_profile(SPEC, compute(attention=flat(20)))
    made = run([load(0, 0), ahead(8, 1), use(0, 0)], [use(8, 1)], profile=profile)
    # attention ..20, load 0 ..30, prefetch 30..40, compute 0 30..33, attention 33..53, compute 8 53..56
    assert spent(made) == (56, 46, 10, 20)
    assert made.timing().total.late == 0


def test_a_late_prefetch_is_waited_for() -> None:
    made = run([load(0, 0), use(0, 0), ahead(8, 1)], [use(8, 1)], profile=make_profile(SPEC, compute(gate=4)))
    # gate ..4, load ..14, compute ..17, prefetch 17..27, gate ..21, wait ..27, compute ..30
    assert spent(made) == (30, 2 * 4 + 6, 10 + 6, 20)
    total = made.timing().total
    assert (total.late, total.promoted, total.dropped) == (1, 0, 0)


def test_synchronous_prefetches_are_all_waited_for() -> None:
    prices = Prices(make_profile(SPEC, compute(gate=4)), SPEC, TimelineOptions(synchronous=True))
    made = run([load(0, 0), use(0, 0), ahead(8, 1), ahead(9, 2)], [use(8, 1)], line=Timeline(prices))
    # gate ..4, load ..14, compute ..17, prefetches 17..27..37, gate ..21, wait for both ..37, compute 8 ..40
    assert spent(made) == (40, 2 * 4 + 6, 10 + 16, 30)
    assert made.timing().total.late == 2


def test_demand_goes_ahead_of_prefetches_that_have_not_begun() -> None:
    first = [ahead(4, 1), ahead(5, 2), ahead(6, 3)]
    profile = make_profile(SPEC, compute(gate=5))
    made = run([load(0, 0), use(0, 0)], first=first, profile=profile)
    # prefetch 4 from 0 to 10 is not interrupted; load 0 10..20; prefetch 5 only then
    assert spent(made) == (5 + 15 + 3, 8, 15, 23)
    assert made.timing().total.read_bytes == 3000  # that of 5 has begun, that of 6 has not


def test_a_prefetch_that_is_needed_goes_ahead_of_all_that_have_not_begun() -> None:
    first = [ahead(4, 1), ahead(5, 2), ahead(6, 3)]
    made = run([load(0, 0), use(6, 3), use(0, 0)], first=first, profile=make_profile(SPEC, compute(gate=5)))
    # prefetch 4 ..10, then 6 ..20 (promoted over demand 0), load 0 20..30; compute 20..23, 30..33; prefetch 5 30..
    assert spent(made) == (33, 5 + 6, 15 + 7, 33)
    total = made.timing().total
    assert (total.late, total.promoted, total.dropped) == (1, 1, 0)


def test_a_prefetch_that_has_not_begun_is_dropped_with_its_slot() -> None:
    first = [ahead(4, 1), ahead(5, 2)]
    made = run([load(0, 2), use(0, 2)], first=first, profile=make_profile(SPEC, compute(gate=5)))
    assert spent(made) == (5 + 15 + 3, 8, 15, 20)
    total = made.timing().total
    assert (total.dropped, total.read_bytes) == (1, 2000)


def test_a_slot_that_is_still_written_is_waited_for() -> None:
    made = run([load(0, 1), use(0, 1)], first=[ahead(4, 1)], profile=make_profile(SPEC, compute(gate=5)))
    assert spent(made) == (5 + 15 + 3, 8, 15, 20)
    assert made.timing().total.dropped == 0


def test_what_was_loaded_beside_is_waited_for_before_the_next_expert() -> None:
    made = run([load(0, 0), load(1, 1), use(0, 0)], experts=[[0]])
    assert spent(made) == (20 + 3, 3, 20, 20)
    assert made.timing().total.late == 0


def test_a_batch_computes_each_expert_over_its_tokens_and_attends_request_by_request() -> None:
    costs = compute(expert=line(3), attention=line(2), prompt_attention=line(5), gate=1, shared=1, head=7)
    info = forward([0, 0, 0, 1, 2], prefill=[True, True, True, False, False], start=4)
    experts = [[0, 1], [0, 1], [0, 2], [1, 2], [0, 1]]
    made = run(
        [load(k, k) for k in range(3)] + [use(k, k) for k in range(3)],
        info=info,
        experts=experts,
        profile=make_profile(SPEC, costs),
    )
    attention = max(3 * 5, 7 * 5 - 4 * 5) + 2 * 5 + 2 * 5
    before = attention + 1
    # loads from `before`; 4 tokens of 0 at +10, 4 of 1 at +22, 2 of 2 at +34
    assert spent(made)[:3] == (before + 10 + 12 + 12 + 6 + 1 + 7, before + 30 + 8, 10)


def test_layers_without_experts_come_where_they_are() -> None:
    spec = replace(SPEC, layer_ids_L=(1, 3))
    costs = compute(attention=flat(10), dense=100, gate=1, shared=2, head=5)
    prices = Prices(make_profile(spec, costs, num_hidden_layers=5), spec, TimelineOptions())
    assert prices.forward(forward()) == ((121, 121), 2, 115)
    other = Prices(make_profile(SPEC, costs, num_hidden_layers=9), spec, TimelineOptions())
    assert other.forward(forward()) == ((121, 121), 2, 5)  # of a profile of other layers, those behind are not known


def test_first_tokens_and_output_tokens() -> None:
    made = run([load(0, 0), use(0, 0)], info=forward([0, 0], prefill=[True, True]))  # 13
    run([use(0, 0)], info=forward([0, 1], prefill=[True, True], start=2), line=made)  # 3
    run([use(0, 0), load(1, 1), use(1, 1)], info=forward([0, 1]), line=made)  # 16
    run([use(0, 0)], info=forward([0, 1]), line=made)  # 3
    timing = made.timing()
    assert timing.ttft_p50_s == pytest.approx((16 + 3) / 2 * 1e-9)
    assert timing.ttft_p95_s == pytest.approx((3 + 0.95 * 13) * 1e-9)
    assert timing.tpot_mean_s == timing.tpot_p50_s == pytest.approx(9.5e-9)
    assert timing.decode_forwards == 2
    assert timing.prefill.seconds == pytest.approx(16e-9)
    assert timing.decode.stall_share == pytest.approx(10 / 19)
    values = timing.to_json()
    assert values["tpot_overlap_bound_s"] == pytest.approx(10e-9 / 2)
    assert values["tpot_serial_bound_s"] == pytest.approx(19e-9 / 2)


def test_no_prompts_and_no_new_tokens_give_no_percentiles() -> None:
    prompts, none = run([load(0, 0), use(0, 0)], info=forward(prefill=[True])).timing(), run([]).timing()
    assert prompts.tpot_p50_s is prompts.tpot_mean_s is prompts.to_json()["tpot_overlap_bound_s"] is None
    assert none.ttft_p95_s is None
    assert none.total.stall_share == none.total.seconds == 0


def test_predictions_take_the_compute_stream() -> None:
    predictor = MeteredPredictor(MadeUpPredictor(SPEC))
    made = Timeline(Prices(make_profile(SPEC, predictor=7), SPEC, TimelineOptions()), predictor=predictor)
    info = forward()
    made.begin_forward(info, [])
    event = GateEvent(forward=info, layer=0, experts_TK=((0,),))
    predictor.observe(event)
    predictor.scores(1)
    made.event(event, [load(0, 0), use(0, 0)])
    made.end_forward(info)
    assert spent(made) == (7 + 13, 3, 10, 10)
    assert made.timing().total.prediction_s == pytest.approx(7e-9)


@pytest.mark.parametrize(
    ("lag", "each_ns", "elapsed", "stalled", "waited"),
    [(0, 7, 39, 16, 14), (0, 20, 59, 10, 40), (1, 7, 39, 30, 0), (1, 20, 39, 23, 7)],
)
def test_predictions_beside_the_compute_stream_are_waited_for_where_they_are_used(
    lag: int, each_ns: int, elapsed: int, stalled: int, waited: int
) -> None:
    """In each of three layers a load of 10 ns and an expert of 3."""
    spec = make_spec(layers=3, experts=8)
    predictor = MeteredPredictor(MadeUpPredictor(spec))
    prices = Prices(make_profile(spec, predictor=each_ns), spec, TimelineOptions())
    made = Timeline(prices, predictor=predictor, prediction_lag=lag)
    info = forward()
    made.begin_forward(info, [])
    for layer in range(3):
        event = GateEvent(forward=info, layer=layer, experts_TK=((0,),))
        predictor.observe(event)
        if layer + lag < 2:
            predictor.scores(layer + lag + 1)
        made.event(event, [load(8 * layer, layer), use(8 * layer, layer)])
    made.end_forward(info)
    assert spent(made) == (elapsed, 9, stalled, 30)
    assert made.timing().total.prediction_s == pytest.approx(waited * 1e-9)


@pytest.mark.parametrize(
    ("lag", "each_ns", "searches", "partial", "elapsed", "waited"),
    [
        (None, None, 1, 0, 39 + 3 * 2, 0),  # free without a prediction time
        (None, 7, 1, 0, 39 + 3 * 2 + 7 + 3 * 7, 4 * 7),
        (1, 7, 1, 0, 39 + 3 * 2 + 7, 7),  # beside the loads, but for the one before the first layer
        (1, 17, 1, 0, 39 + 3 * 2 + 17, 17 + 2 + 4),  # longer than a layer
        (None, None, 0, 1, 39 + 3 * 2 + 2 * (2 + 3), 2 * (2 + 3)),  # a gate and an expert, to each next layer
        (0, None, 0, 1, 39 + 3 * 2, 2 * (2 + 3)),  # beside the load
    ],
)
def test_a_policys_own_searches_and_partial_forwards_take_time(
    lag: int | None, each_ns: int | None, searches: int, partial: int, elapsed: int, waited: int
) -> None:
    """In each of three layers a gate of 2 ns, a load of 10 and an expert of 3."""
    spec = make_spec(layers=3, experts=8)
    policy = build_policy("lru", spec, {}, 4)
    profile = make_profile(spec, compute(gate=2), predictor=each_ns)
    made = Timeline(Prices(profile, spec, TimelineOptions()), prediction_lag=lag, policy=policy)
    info = forward()
    policy.searches += searches
    made.begin_forward(info, [])
    for layer in range(3):
        policy.searches += searches
        policy.partial_forwards += partial * (layer < 2)
        made.event(
            GateEvent(forward=info, layer=layer, experts_TK=((0,),)), [load(8 * layer, layer), use(8 * layer, layer)]
        )
    made.end_forward(info)
    assert round(made.timing().total.seconds * 1e9) == elapsed
    assert round(made.timing().total.prediction_s * 1e9) == waited


@pytest.mark.parametrize(("reuses", "each_ns"), [(False, 4 + 3 + 2), (True, 2)])
def test_a_partial_forward_computes_experts_again_or_reuses_their_outputs(reuses: bool, each_ns: int) -> None:
    """A gate of 2 ns, an expert of 3 and a shared one of 4."""
    prices = Prices(make_profile(SPEC, compute(gate=2, shared=4)), SPEC, TimelineOptions(reuse_residents=reuses))
    assert prices.partial_forward_ns(GateEvent(forward=forward(), layer=0, experts_TK=((0,),))) == each_ns


def test_prefetches_wait_for_the_outputs_that_a_partial_forward_reuses() -> None:
    """A gate of 2 ns, experts of 100, a shared one of 1000, loads of 200, and three residents."""
    policy = build_policy("lru", SPEC, {}, 8)
    profile = make_profile(SPEC, compute(gate=2, expert=flat(100), shared=1000), loads={"disk": flat(200)})
    made = Timeline(Prices(profile, SPEC, TimelineOptions(reuse_residents=True)), policy=policy)
    residents = [use(key, key) for key in range(3)]
    run(residents, line=made, first=[ahead(key, key) for key in range(3)])
    began, info = made.now, forward()
    made.begin_forward(info, [])
    policy.partial_forwards += 1
    program = [ahead(8, 4), load(3, 3), *residents, use(3, 3)]
    made.event(GateEvent(forward=info, layer=0, experts_TK=((0, 1, 2, 3),)), program)
    # gate ..2, partial forward ..4, load ..204 beside the residents ..304, the loaded expert ..404, shared ..1404
    assert made.now - began == 1404
    made.event(GateEvent(forward=info, layer=1, experts_TK=((0,),)), [use(8, 4)])
    # gate, residents, shared and partial forward end at 2 + 300 + 1000 + 2, the prefetch 200 later; gate ..1406
    assert made.now - began == 1504 + 100 + 1000


def test_the_host_computes_beside_a_gpu_and_instead_of_a_cpu() -> None:
    program = [Step(StepKind.HOST, 5, -1), Step(StepKind.HOST, 6, -1), load(0, 0), use(0, 0)]
    assert spent(run(program)) == (10 + 3, 9, 4, 10)  # both are done while the load is under way

    gpu = compute(device="cuda", expert=flat(1))
    for host_ns, elapsed in ((4, 11), (20, 40)):
        profile = make_profile(SPEC, gpu, compute(expert=flat(host_ns)), loads={"pinned": flat(10)})
        made = Timeline(Prices(profile, SPEC, TimelineOptions(device="cuda", tier="pinned")))
        total = run(program, line=made).timing().total
        assert round(total.seconds * 1e9) == elapsed  # 10 of loading and 1 of computing, or what the host takes
        assert round(total.host_s * 1e9) == 2 * host_ns
        assert round(total.host_wait_s * 1e9) == elapsed - 11


def test_a_read_for_a_gpu_is_copied_too() -> None:
    profile = make_profile(SPEC, compute(device="cuda"), loads={"disk": flat(10), "pinned": flat(4)})
    prices = Prices(profile, SPEC, TimelineOptions(device="cuda"))
    assert (prices.load_ns("disk", 0), prices.load_ns("pinned", 1)) == (14, 4)
    with refused(MismatchError, "cpu"):
        prices.host_expert_ns(GateEvent(forward=forward(), layer=0, experts_TK=((0,),)), 0)


def test_what_a_profile_lacks_is_refused() -> None:
    profile = make_profile(SPEC)
    with refused(MismatchError, "synthetic"):
        Prices(make_profile(make_spec(experts=16)), SPEC, TimelineOptions())
    with refused(MismatchError, "cuda"):
        Prices(profile, SPEC, TimelineOptions(device="cuda"))
    with refused(MismatchError, "pinned"):
        Prices(profile, SPEC, TimelineOptions(tier="pinned"))
    with refused(MismatchError, "--set timeline.prediction_ms"):
        Prices(profile, SPEC, TimelineOptions()).prediction_ns(1)
    assert Prices(profile, SPEC, TimelineOptions(prediction_ms=0.5)).prediction_ns(1) == 500_000
    with refused(UsageError, "io_threads", 0):
        TimelineOptions(io_threads=0)
    with refused(UsageError, "prediction_ms", -1):
        TimelineOptions(prediction_ms=-1)


def drive(name: str, num_slots: int, stream: list, profile: CostProfile) -> tuple[Timing, Residency]:
    spec = profile.spec
    predictor = MeteredPredictor(MadeUpPredictor(spec))
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events in stream for e in events]
    residency = Residency(build_policy(name, spec, {}, num_slots, predictor=predictor, future=future))
    made = Timeline(Prices(profile, spec, TimelineOptions()), predictor=predictor)
    for info, events in stream:
        made.begin_forward(info, residency.begin_forward(info))
        for event in events:
            made.event(event, residency.event(event))
        residency.end_forward(info)
        made.end_forward(info)
    return made.timing(), residency


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


@pytest.mark.parametrize("name", plugins.names("policy"))
@settings(max_examples=10, deadline=None)
@given(
    num_slots=st.integers(2, 40),
    prompt_tokens=st.integers(0, 6),
    seed=st.integers(0, 1 << 16),
    load_ns=st.integers(0, 40),
    expert_ns=st.integers(0, 9),
    gate_ns=st.integers(0, 30),
)
def test_time_lies_between_the_bounds(
    name: str, num_slots: int, prompt_tokens: int, seed: int, load_ns: int, expert_ns: int, gate_ns: int
) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    fewest = policy_class(name).min_slots(spec, plugins.load("policy", name).Options())
    stream = list(
        random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=4, seed=seed, signals=True)
    )
    costs = compute(expert=line(expert_ns), gate=gate_ns, shared=2, head=3)
    profile = make_profile(spec, costs, loads={"disk": flat(load_ns)}, predictor=2)
    timing, residency = drive(name, max(num_slots, fewest), stream, profile)
    for phase, counts in (("prefill", residency.prefill), ("decode", residency.decode)):
        took = getattr(timing, phase)
        assert took.stall_s >= 0
        assert took.late <= counts.prefetched
        assert took.promoted <= took.late
        assert ns(took.seconds) == ns(took.compute_s) + ns(took.prediction_s) + ns(took.stall_s)
        assert ns(took.overlap_bound_s) <= ns(took.seconds)
        assert ns(took.seconds) <= ns(took.serial_bound_s) + ns(took.prediction_s)
    total, counts = timing.total, residency.counts
    assert total.read_bytes <= 1000 * (counts.loads - total.dropped)
    assert total.read_bytes >= 1000 * counts.missed  # whatever was computed was read
    if not counts.prefetch_loads:
        assert total.read_bytes == 1000 * counts.loads
        assert total.late == total.dropped == 0


@settings(max_examples=20, deadline=None)
@given(num_slots=st.integers(2, 24), seed=st.integers(0, 1 << 16))
def test_belady_reads_least(num_slots: int, seed: int) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    stream = list(random_stream(spec, num_requests=1, prompt_tokens=0, new_tokens=12, seed=seed))
    profile = make_profile(spec)
    read = {name: drive(name, num_slots, stream, profile)[0].total.read_bytes for name in ("belady", "lru", "lfu")}
    assert read["belady"] == min(read.values())


def test_everything_resident_takes_compute_alone() -> None:
    stream = list(random_stream(SPEC, num_requests=1, prompt_tokens=8, new_tokens=30, seed=0))
    profile = make_profile(SPEC, compute(attention=flat(5), gate=1, head=2), loads={"disk": flat(0)})
    timing, _ = drive("lru", SPEC.total_experts, stream, profile)
    assert timing.total.stall_s == 0
    per_token = 2 * (5 + 1 + 2 * 3) + 2
    assert timing.tpot_p50_s == timing.tpot_p95_s == pytest.approx(per_token * 1e-9)
    assert timing.tpot_p50_s == pytest.approx(profile.decode_s(1))


def test_runs_side_by_side_share_prices_and_disturb_nothing() -> None:
    rng = np.random.default_rng(5)
    stream = list(random_stream(SPEC, num_requests=2, prompt_tokens=3, new_tokens=5, seed=int(rng.integers(99))))
    profile = make_profile(SPEC, compute(expert=line(3), attention=line(1)))
    prices = Prices(profile, SPEC, TimelineOptions())
    pools = [Residency(build_policy("lru", SPEC, {}, slots)) for slots in (3, 9)]
    lines = [Timeline(prices) for _ in pools]
    for info, events in stream:
        for pool, made in zip(pools, lines, strict=True):
            made.begin_forward(info, pool.begin_forward(info))
        for event in events:
            for pool, made in zip(pools, lines, strict=True):
                made.event(event, pool.event(event))
        for made in lines:
            made.end_forward(info)
    assert [made.timing() for made in lines] == [drive("lru", slots, stream, profile)[0] for slots in (3, 9)]


def test_link_and_host_slow_each_other_while_both_work() -> None:
    gpu = compute(device="cuda", expert=flat(1))
    profile = make_profile(SPEC, gpu, compute(expert=flat(30)), loads={"pinned": flat(10)})
    profile = replace(profile, link_share=0.5, host_share=0.8, miss_s=4e-9)
    prices = Prices(profile, SPEC, TimelineOptions(device="cuda", tier="pinned"))
    host = Step(StepKind.HOST, 2, -1)
    # 4: miss; link 10 at half its rate ..24; host 16 of 30 until then, the other 14 ..38
    made = run([host, load(0, 0), use(0, 0)], line=Timeline(prices))
    assert made.now == 38
    made = run([load(0, 0), use(0, 0)], line=Timeline(prices))
    assert made.now == 4 + 10 + 1
    # the host ends first: 4 + 30 / 0.8, 42 in all; the link has done 19 of 40 then, and needs 21 more
    made = run(
        [host, *(load(key, key) for key in (0, 1, 3, 4)), *(use(key, key) for key in (0, 1, 3, 4))],
        line=Timeline(prices),
    )
    assert made.now == pytest.approx(42 + 21 + 1, abs=1)


def test_a_split_needs_costs_of_the_host() -> None:
    gpu = compute(device="cuda", expert=flat(1))
    profile = make_profile(SPEC, gpu, loads={"pinned": flat(10)})
    with refused(MismatchError, "cpu"):
        Prices(profile, SPEC, TimelineOptions(device="cuda", tier="pinned")).split_costs()
    assert Prices(make_profile(SPEC), SPEC, TimelineOptions()).split_costs() is None
