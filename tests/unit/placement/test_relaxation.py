"""Bounds of a placement, and their limits."""

from dataclasses import replace

import highspy
import numpy as np
import pytest

from moetool.costing.costs import Curve
from moetool.placement import linear_programme
from moetool.placement.bounds import latency_bound, memory_bound, work_bound
from moetool.placement.latency import Latency, along, flows, hull, knots, unit_latency
from moetool.placement.local_search import Layer
from moetool.placement.planner import Problem, place
from moetool.placement.relaxation import hottest, relax
from moetool.placement.scoring import score
from tests.clusters import make_cluster, make_problem
from tests.synthetic import make_spec

FREE = Curve(x=(0.0, 1.0), y=(0.0, 0.0))


def _latency(comp: Curve, num_gpus: int) -> Latency:
    """Sending costs nothing."""
    return replace(unit_latency(make_cluster([[1] * num_gpus])), name="made up", comp=comp, links=(FREE,))


def _problem(tokens_GE: list[list[float]], slots: int, comp: Curve) -> Problem:
    cluster = make_cluster([[slots] * len(tokens_GE)])
    tokens_GLE = np.array(tokens_GE)[:, None]
    spec = make_spec(1, tokens_GLE.shape[2])
    return make_problem(spec, cluster, tokens_GLE=tokens_GLE, latency=_latency(comp, len(tokens_GE)))


def test_more_tokens_may_take_less_time_than_the_hottest_expert_alone() -> None:
    problem = _problem([[6.0, 1.0, 1.0], [0.0, 0.0, 0.0]], 3, Curve(x=(6.0, 8.0), y=(50.0, 1.0)))
    together = np.zeros((2, 1, 3), bool)
    together[0] = True
    found = score(problem, together)
    assert found.latency == 1.0  # the hottest expert alone would take 50
    assert found.latency_bound is not None and found.latency_bound <= 1.0
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.array([3, 3]), latency=problem.latency)
    assert hottest(layer) == 1.0


def test_a_curve_that_meets_zero_before_its_first_knot_is_not_over_estimated() -> None:
    curve = Curve(x=(10.0, 20.0), y=(5.0, 15.0))  # nothing up to 5 tokens
    amounts = np.linspace(0, 30, 121)
    lines = hull(lambda amount: along(curve, amount), knots(curve, 30.0))
    under = np.max([slope * amounts + cut for slope, cut in lines], axis=0)
    assert (under <= along(curve, amounts) + 1e-9).all()
    problem = _problem([[5.0, 0.0], [0.0, 5.0]], 1, curve)
    free = score(problem, np.eye(2, dtype=bool)[:, None])
    assert free.latency == 0
    assert free.latency_bound == free.memory_bound == pytest.approx(0)
    halves = knots(curve, 30.0, scale=2.0)  # two bytes a token
    assert {2.5, 5.0, 10.0} <= set(halves.tolist())


def test_one_expert_on_two_gpus_refutes_the_printed_theorem() -> None:
    """DIRECTOR's Theorem 2 has T(P) <= (1 + eps) of the printed optimum, which splits the one expert there is."""
    problem = _problem([[4.0], [4.0]], 1, Curve(x=(0.0, 1.0), y=(0.0, 1.0)))
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.array([1, 1]), latency=problem.latency)
    best = min(layer.cost(np.array([gpu])) for gpu in (0, 1))
    assert (work_bound(problem), best) == (pytest.approx(4.0), 8.0)  # Eq. 6's optimum, and that of placements
    relaxed = relax(layer)
    assert relaxed is not None and relaxed.bound == pytest.approx(8.0)  # with the hottest expert's time in it


def test_the_primal_simplex_stands_in_for_the_dual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    problem = _problem(rng.integers(0, 9, (4, 12)).astype(float).tolist(), 4, Curve(x=(0.0, 1.0), y=(0.0, 1.0)))
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.full(4, 4), latency=problem.latency)
    dual = relax(layer)
    monkeypatch.setattr(linear_programme, "STRATEGIES", linear_programme.STRATEGIES[1:])
    primal = relax(layer)
    assert dual is not None and primal is not None and primal.bound == pytest.approx(dual.bound)
    assert relax(layer, 0.9 * dual.bound) is None


@pytest.mark.parametrize("status", ["kUnknown", "kSolveError"])
def test_a_budget_that_no_simplex_decides_is_not_met(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem([[3.0, 1.0], [1.0, 2.0]], 1, Curve(x=(0.0, 1.0), y=(0.0, 1.0)))
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.array([1, 1]), latency=problem.latency)
    assert relax(layer, 100.0) is not None
    monkeypatch.setattr(highspy.Highs, "getModelStatus", lambda highs: getattr(highspy.HighsModelStatus, status))
    assert relax(layer, 100.0) is None
    with pytest.raises(AssertionError):
        relax(layer)


def test_placements_that_are_compared_have_one_bound() -> None:
    tokens_GLE = np.array([[[4.0, 1.0, 1.0]], [[1.0, 3.0, 2.0]]])
    problem = make_problem(make_spec(1, 3), make_cluster([[2], [2]]), tokens_GLE=tokens_GLE)
    apart = np.array([[[True, False, False]], [[False, True, True]]])
    other = np.array([[[True, True, False]], [[False, False, True]]])
    common = latency_bound(problem, apart, other)
    assert common == latency_bound(problem, other, apart)
    assert work_bound(problem) < common <= min(score(problem, one).latency for one in (apart, other))
    copied = apart | other
    # A GPU's two slots hold the experts of 5 of its 6 tokens at best; the other goes out and comes back.
    assert latency_bound(problem, apart, copied) == memory_bound(problem) == work_bound(problem) + 2.0
    assert memory_bound(problem) <= score(problem, copied).latency


@pytest.mark.parametrize("seed", range(12))
def test_curves_that_rise_and_fall_are_bounded_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    comp = Curve(x=(3.0, 30.0, 90.0, 200.0), y=tuple((rng.random(4) * 100).tolist()))
    link = Curve(x=(2.0, 40.0, 100.0), y=tuple((rng.random(3) * 40).tolist()))
    cluster = make_cluster([[3, 2], [3]])
    latency = replace(unit_latency(cluster, sides="both" if seed % 2 else "send"), comp=comp, links=(link,))
    problem = make_problem(make_spec(1, 5), cluster, seed=seed, latency=latency)
    best = place("exhaustive", problem, {"objective": "latency"})
    optimum = score(problem, best, bounds=False).latency
    assert work_bound(problem) <= optimum + 1e-6
    assert latency_bound(problem, best) <= optimum + 1e-6


def test_copies_may_beat_the_bound_of_single_copies_but_not_that_of_the_work() -> None:
    problem = _problem([[10.0, 1.0], [10.0, 1.0]], 2, Curve(x=(0.0, 1.0), y=(0.0, 1.0)))
    single, copied = np.zeros((2, 1, 2), bool), np.ones((2, 1, 2), bool)
    single[0, 0, 0] = single[1, 0, 1] = True
    one, both = score(problem, single), score(problem, copied)
    assert one.latency_bound is not None and one.memory_bound is not None
    assert both.latency < one.latency_bound
    assert both.latency == pytest.approx(one.memory_bound)
    assert both.latency_bound == both.memory_bound == one.memory_bound


def test_experts_of_several_sizes_are_bounded_by_slots_not_by_bytes() -> None:
    spec = replace(make_spec(2, 2), expert_bytes_L=(1000, 500))
    problem = make_problem(spec, make_cluster([[2], [3]]), tokens_GLE=np.ones((2, 2, 2)))
    by_bytes = np.zeros((2, 2, 2), bool)
    by_bytes[0, 0, 0] = by_bytes[0, 1] = True  # 2000 bytes, but three experts
    by_bytes[1, 0] = by_bytes[1, 1] = True
    found = score(problem, by_bytes)
    assert (found.remote_calls, found.remote_bound) == (1.0, 3.0)


def test_local_calls_are_those_of_the_routing() -> None:
    tokens_GLE = np.array([[[6.0, 2.0]], [[3.0, 1.0]]])
    problem = make_problem(make_spec(1, 2), make_cluster([[1], [2]]), tokens_GLE=tokens_GLE)
    placed_GLE = np.array([[[True, False]], [[True, True]]])
    near = score(problem, placed_GLE)
    even = score(problem, placed_GLE, routing="even")
    assert (near.local_N, near.remote_calls) == ((6 / 8, 1.0), 2.0)
    assert even.local_N == (3 / 8, 2.5 / 4)  # half of expert 0's tokens go to the other copy
    assert even.remote_calls == 6.5
    sent = flows(problem.cluster, tokens_GLE[:, 0], placed_GLE[:, 0], "even")
    assert even.remote_calls == sent[0, 1] + sent[1, 0]


def test_bytes_are_not_given_where_the_hidden_size_is_not_known() -> None:
    spec = replace(make_spec(1, 2), hidden_size=0)
    problem = make_problem(spec, make_cluster([[1], [1]]))
    found = score(problem, np.array([[[True, False]], [[False, True]]]))
    assert [sent for _, _, sent in found.link_bytes] == [None, None]
