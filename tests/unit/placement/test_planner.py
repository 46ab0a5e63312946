"""Placement algorithms against what is known from outside: published outputs, brute force, hand computation."""

import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.machine import Machine
from moetool.base.types import Cluster
from moetool.costing.costs import ComputeCosts, CostProfile, Curve
from moetool.placement.comparison import comparable
from moetool.placement.demand import Demand, per_server, spread
from moetool.placement.latency import (
    Latency,
    along,
    flows,
    flows_to,
    hull,
    layers_s,
    linear_latency,
    profiled_latency,
    unit_latency,
)
from moetool.placement.local_search import Descent, Layer
from moetool.placement.planner import apportion, place
from moetool.placement.planners import eplb, moetuner, prism
from moetool.placement.relaxation import relax
from moetool.placement.rounding import round_layer
from moetool.placement.scoring import balancedness, messages, score
from tests.clusters import make_cluster, make_problem
from tests.refusals import refused
from tests.synthetic import make_spec

# The example in the README of github.com/deepseek-ai/EPLB, and its output.
EPLB_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
EPLB_OUTPUT = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def _gpu_loads(loads_LE: np.ndarray, slots_LP: np.ndarray, num_gpus: int) -> np.ndarray:
    rows = []
    for tokens_E, slots_P in zip(loads_LE, slots_LP, strict=True):
        per_copy_E = tokens_E / np.bincount(slots_P, minlength=len(tokens_E))
        rows.append(per_copy_E[slots_P].reshape(num_gpus, -1).sum(axis=1))
    return np.array(rows)


def test_eplb_gives_what_its_authors_published() -> None:
    assert eplb.rebalance_experts(EPLB_LOADS, 16, 4, 2, 8).tolist() == EPLB_OUTPUT


@pytest.mark.parametrize(("groups", "expected"), [(4, (0.828, 0.805)), (3, (0.932, 0.840))])
def test_eplb_is_as_balanced_as_known(groups: int, expected: tuple[float, float]) -> None:
    slots_LP = eplb.rebalance_experts(EPLB_LOADS, 16, groups, 2, 8)  # 3 groups on 2 nodes: the global form
    loads_LG = _gpu_loads(EPLB_LOADS, slots_LP, 8)
    assert loads_LG.mean(axis=1) / loads_LG.max(axis=1) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("seed", range(5))
def test_eplb_does_not_care_how_experts_are_numbered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads_LE = rng.random((2, 12)) * 1000
    relabel = rng.permutation(12)  # the expert that is now called i was relabel[i]
    before = eplb.rebalance_experts(loads_LE, 16, 1, 1, 8)
    after = eplb.rebalance_experts(loads_LE[:, relabel], 16, 1, 1, 8)
    for layer in range(2):
        sets = [
            sorted(tuple(sorted(gpu)) for gpu in rows.reshape(8, 2).tolist())
            for rows in (before[layer], relabel[after[layer]])
        ]
        assert sets[0] == sets[1]


def test_eplb_never_puts_an_expert_twice_on_a_gpu_and_fills_the_slot() -> None:
    spec = make_spec(1, 4)
    loads = np.zeros((2, 1, 4))
    loads[:, 0] = [1000, 1, 1, 1]  # published: two of the four copies of expert 0 share a GPU
    problem = make_problem(spec, make_cluster([[4, 4]]), tokens_GLE=loads)
    placed_GLE = place("eplb", problem, {"slots_per_gpu": 3})
    assert placed_GLE.sum(axis=2).tolist() == [[3], [3]]
    assert placed_GLE[:, 0, 0].all()


def test_the_published_eplb_refuses_unequal_gpus() -> None:
    problem = make_problem(make_spec(2, 6), make_cluster([[6], [8]]))
    with refused(UsageError, "eplb"):
        place("eplb", problem, {"form": "published"})


def test_eplb_deals_unequal_layers_where_equal_ones_would_not_hold_everything() -> None:
    problem = make_problem(make_spec(3, 4), make_cluster([[4, 4, 4]]))  # four slots a layer, on three GPUs
    assert place("eplb", problem).sum() == 12
    with refused(CapacityError, 1, 3, "4 experts", "--set form"):
        place("eplb", problem, {"form": "published"})
    with refused(CapacityError, "slots_per_gpu 1"):
        place("eplb", problem, {"slots_per_gpu": 1})


def test_eplb_packs_the_heaviest_copy_first() -> None:
    placed_GE = eplb.pack_unequal(np.array([9.0, 1, 1]), np.array([2, 2]), np.ones(2))
    assert placed_GE.tolist() == [[True, True, False], [True, False, True]]


def test_uniform_is_consecutive_and_hands_on_what_does_not_fit() -> None:
    problem = make_problem(make_spec(1, 7), make_cluster([[7], [7], [1]]))
    placed_GLE = place("uniform", problem)
    assert [np.flatnonzero(placed_GLE[g, 0]).tolist() for g in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("seed", range(6))
def test_prism_exact_is_the_best_of_all_placements(seed: int) -> None:
    problem = make_problem(make_spec(2, 4), make_cluster([[3], [2, 2], [4]]), seed=seed)
    exact, tried = (score(problem, place(name, problem), bounds=False) for name in ("prism_exact", "exhaustive"))
    assert exact.remote_calls == pytest.approx(tried.remote_calls)


@pytest.mark.parametrize("seed", range(4))
def test_prism_exact_calls_no_more_remotely_than_any_other_planner(seed: int) -> None:
    problem = make_problem(make_spec(3, 8), make_cluster([[12], [9], [8, 8]]), seed=seed)
    best = score(problem, place("prism_exact", problem), bounds=False).remote_calls
    for name in ("uniform", "redundant", "smartmoe", "eplb", "prism", "director", "annealing"):
        assert best <= score(problem, place(name, problem), bounds=False).remote_calls + 1e-6, name


@pytest.mark.parametrize("seed", range(4))
def test_moetuner_finds_the_least_deviation_and_the_least_largest_transfer(seed: int) -> None:
    """Both programmes against every way to cluster seven experts and to place three clusters."""
    room_C, spec, cluster = np.array([3, 2, 4]), make_spec(1, 7), make_cluster([[3], [2, 4]], link_bytes_s=1e3)
    problem = make_problem(spec, cluster, seed=seed)
    exact = moetuner.Options(tolerance=0.0, nodes=100_000)
    tokens_GE = problem.demand.tokens_GLE[:, 0]
    tokens_E = tokens_GE.sum(axis=0)

    def deviation(gpu_E: np.ndarray) -> float:
        return float(np.abs(np.bincount(gpu_E, tokens_E, 3) - tokens_E.sum() / 3).sum())

    tried = (np.array(gpu_E) for gpu_E in itertools.product(range(3), repeat=7))
    fitting = (
        gpu_E
        for gpu_E in tried
        if ((size_C := np.bincount(gpu_E, minlength=3)) >= 1).all() and (size_C <= room_C).all()
    )
    assert (moetuner.clusters(tokens_E, room_C, moetuner.Options(nodes=1)).sum(axis=0) == 1).all()
    chosen_CE = moetuner.clusters(tokens_E, room_C, exact)
    assert deviation(chosen_CE.argmax(axis=0)) == pytest.approx(min(map(deviation, fitting)))
    placed_GE = place("moetuner", problem, exact)[:, 0]

    def largest(placed_GE: np.ndarray) -> float:
        return float(problem.latency.comm_s(tokens_GE @ placed_GE.T).max())

    orders = (chosen_CE[list(order)] for order in itertools.permutations(range(3)))
    assert largest(placed_GE) == pytest.approx(
        min(map(largest, (each for each in orders if (each.sum(axis=1) <= room_C).all())))
    )


def test_moetuner_deals_out_experts_where_the_search_finds_no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS promises none within a number of nodes."""
    monkeypatch.setattr("scipy.optimize.milp", lambda *args, **options: SimpleNamespace(x=None))
    tokens_E, room_C = np.array([9.0, 0.0, 5.0, 4.0, 0.0, 3.0]), np.array([3, 1, 4, 0])
    chosen_CE = moetuner.clusters(tokens_E, room_C, moetuner.Options())
    assert [np.flatnonzero(chosen_E).tolist() for chosen_E in chosen_CE] == [[0], [2], [1, 3, 4, 5], []]


def test_no_planner_of_the_default_comparison_solves_integer_programmes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many experts one takes half a minute for each layer."""

    def solve(*args: object, **options: object) -> None:
        raise AssertionError("an integer programme")

    monkeypatch.setattr("scipy.optimize.milp", solve)
    problem = make_problem(make_spec(1, 4), make_cluster([[2], [2]]))
    for name in comparable():
        assert place(name, problem).any(axis=0).all()
    with pytest.raises(AssertionError, match="programme"):
        place("moetuner", problem)


def test_moetuner_refuses_a_tolerance_below_zero() -> None:
    with refused(UsageError, "tolerance", "-1"):
        place("moetuner", make_problem(make_spec(1, 4), make_cluster([[4]])), {"tolerance": -1.0})


def test_whole_layers_go_to_servers_that_use_all_experts_alike() -> None:
    spec = make_spec(8, 8)
    cluster = make_cluster([[32], [16, 16], [32]])
    problem = make_problem(spec, cluster, tokens_GLE=np.full((4, 8, 8), 100.0))
    held_NLE = per_server(cluster, place("whole_layers", problem)) > 0
    whole_NL = held_NLE.all(axis=2)
    assert (whole_NL == held_NLE.any(axis=2)).all() and (whole_NL.sum(axis=1) == 4).all()
    assert sorted(whole_NL.sum(axis=0).tolist()) == [1, 1, 1, 1, 2, 2, 2, 2]  # copies of all layers, before third ones
    few = score(problem, place("whole_layers", problem), bounds=False)
    many = score(problem, place("prism_exact", problem), bounds=False)
    assert few.messages == pytest.approx(0.5, abs=0.01) and many.messages > 1.5
    assert few.remote_calls == many.remote_calls


def test_the_most_used_experts_come_before_whole_layers_where_they_suffice_or_messages_cost_nothing() -> None:
    tokens_GLE = np.full((2, 4, 8), 100.0)
    tokens_GLE[0, :, 2:] = 0.0  # this server uses two experts of each layer
    problem = make_problem(make_spec(4, 8), make_cluster([[7], [32]]), tokens_GLE=tokens_GLE)
    placed_GLE = place("whole_layers", problem)
    assert placed_GLE[0, :, :2].sum() == 7 and placed_GLE[1].all()
    tokens_GLE = 100.0 * np.arange(8, 0, -1) * np.ones((2, 4, 1))
    skewed = make_problem(make_spec(4, 8), make_cluster([[7], [32]]), tokens_GLE=tokens_GLE)
    counts = [sorted(place("whole_layers", skewed, {"call_s": s})[0].sum(axis=1).tolist()) for s in (0.0, 1.0)]
    assert counts == [[1, 2, 2, 2], [0, 0, 0, 7]]


def test_a_layer_too_large_for_any_server_is_on_as_few_as_possible() -> None:
    problem = make_problem(make_spec(1, 9), make_cluster([[2], [6], [4]]))
    assert place("whole_layers", problem).sum(axis=(1, 2)).tolist() == [2, 6, 4]  # 6 and 3 cover it; the rest is free
    with refused(UsageError, "forward_tokens"):
        place("whole_layers", problem, {"forward_tokens": 0})


def test_messages_are_counted_by_forward_and_server() -> None:
    spec, cluster = replace(make_spec(1, 4), top_k_L=(1,)), make_cluster([[4], [4], [4]])
    tokens_GLE = np.zeros((3, 1, 4))
    tokens_GLE[0, 0] = (5, 2, 2, 1)  # the others are idle
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
    placed_GLE = np.zeros((3, 1, 4), bool)
    placed_GLE[0, 0, 0] = placed_GLE[1, 0, 1] = placed_GLE[2, 0, 2] = placed_GLE[2, 0, 3] = True
    for tokens in (1, 4):
        once, twice = 1 - 0.8**tokens, 1 - (0.8 * 0.9) ** tokens
        assert messages(demand, placed_GLE, tokens) == pytest.approx(once + twice)
    placed_GLE[2, 0, 1] = True  # one server has all that is missing
    assert messages(demand, placed_GLE, 1) == pytest.approx(1 - 0.8 * 0.8 * 0.9)
    placed_GLE[0] = True
    assert messages(demand, placed_GLE, 1) == 0.0


@pytest.mark.parametrize("sides", ["both", "send"])
@pytest.mark.parametrize("seed", range(3))
def test_director_lies_between_its_bound_and_a_little_above_the_optimum(seed: int, sides: str) -> None:
    cluster = make_cluster([[4, 4, 4]])
    problem = make_problem(make_spec(2, 6), cluster, seed=seed, latency=unit_latency(cluster, sides=sides))
    found = score(problem, place("director", problem, {"c_max": 2}), c_max=2)
    best = score(problem, place("exhaustive", problem, {"objective": "latency", "c_max": 2}), bounds=False)
    assert found.latency_bound is not None
    assert found.latency_bound - 1e-6 <= best.latency <= found.latency + 1e-6
    assert found.latency <= 1.02 * best.latency


def _uneven(seed: int) -> tuple[Cluster, Latency]:
    """Curves that bend, links of two kinds, GPUs of two speeds."""
    cluster = make_cluster([[4, 4], [5]])
    rng = np.random.default_rng(seed)
    bent = Curve(x=(1.0, 40.0, 200.0), y=tuple(np.sort(rng.random(3) * 100).tolist()))
    fast = Curve(x=(0.0, 50.0, 100.0), y=(0.0, *np.sort(rng.random(2) * 40).tolist()))
    latency = Latency(
        name="made up",
        unit="s",
        comp=bent,
        speed_G=(1.0, 2.0, 1.0),
        links=(bent, fast),
        link_GG=np.array([[-1, 1, 0], [1, -1, 0], [0, 0, -1]]),
        token_bytes=2.0,
        sides="both" if seed % 2 else "send",
    )
    return cluster, latency


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_holds_for_bent_curves_and_unequal_gpus(seed: int) -> None:
    cluster, latency = _uneven(seed)
    problem = make_problem(make_spec(1, 6), cluster, seed=seed, latency=latency)
    best = place("exhaustive", problem, {"objective": "latency", "c_max": 3})
    found = score(problem, place("director", problem, {"c_max": 3, "replicas": False}), c_max=3)
    optimum = score(problem, best, bounds=False).latency
    assert found.latency_bound is not None
    assert found.latency_bound - 1e-6 <= optimum <= found.latency + 1e-6
    assert found.latency <= 1.1 * optimum
    copied = score(problem, place("redundant", problem))
    assert copied.latency_bound is not None
    assert copied.latency_bound <= copied.latency + 1e-6


def test_costs_from_a_profile_and_the_links_of_a_cluster() -> None:
    spec = replace(make_spec(1, 4), hidden_size=8)
    cluster = make_cluster([[4, 4], [4]], link_bytes_s=1000.0, link_latency_s=0.25)
    curve = Curve(x=(1.0, 10.0), y=(1.0, 4.0))
    costs = ComputeCosts(
        device="cpu", dtype="float32", threads=1, expert=curve, attention=curve, prompt_attention=curve, gate=curve,
        shared=curve, dense=None, head=curve,
    )  # fmt: skip
    machine = Machine(**{f.name: "x" if f.type is str else 1 for f in fields(Machine)})  # type: ignore[arg-type]
    profile = CostProfile(
        spec=spec, config_only=True, num_hidden_layers=1, machine=machine, load_average=0.0, measured_s=0.0,
        compute=(costs,), loads=(),
    )  # fmt: skip
    latency = profiled_latency(cluster, spec, profile)
    assert (latency.unit, latency.token_bytes) == ("s", 16.0)
    assert latency.comp_s(np.array([0.0, 10.0, 1.0])).tolist() == pytest.approx([0.0, 4.0, 1.0])
    comm_GG = latency.comm_s(np.array([[5.0, 5, 5], [0, 0, 0], [5, 5, 5]]))
    assert comm_GG[0].tolist() == pytest.approx([0.0, 80 / 20e9, 0.25 + 80 / 1000])
    assert comm_GG[1].tolist() == [0, 0, 0]
    measured = replace(profile, link=Curve(x=(0.0, 100.0), y=(1.0, 2.0)), peer="x:1")
    over = profiled_latency(cluster, spec, measured).comm_s(np.full((3, 3), 5.0))
    assert over[0, 2] == pytest.approx(1.8)
    assert over[0, 1] == pytest.approx(80 / 20e9)
    with refused(MismatchError, "hidden size", "synthetic"):
        unknown = replace(spec, hidden_size=0)
        profiled_latency(cluster, unknown, replace(profile, spec=unknown))


def test_the_printed_binary_search_ends_at_the_same_bound() -> None:
    problem = make_problem(make_spec(1, 8), make_cluster([[4, 4]]), seed=1)
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.array([4, 4]), latency=problem.latency)
    relaxed = relax(layer)
    assert relaxed is not None
    assert relax(layer, relaxed.bound * 0.999) is None
    assert relax(layer, relaxed.bound * 1.001) is not None
    direct, searched = (place("director", problem, {"binary_search": b, "c_max": 4}) for b in (False, True))
    costs = [score(problem, placed, bounds=False).latency for placed in (direct, searched)]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


def test_the_bound_is_the_same_in_any_unit_of_time() -> None:
    """A token's expert takes tens of nanoseconds, far below what HiGHS tells from nothing."""
    cluster = make_cluster([[4] * 4])
    problem = make_problem(make_spec(1, 12), cluster, seed=1)
    bounds = []
    for token_s in (1.0, 1e-8, 1e-11):
        latency = linear_latency(cluster, token_s, token_s, 1.0, "straight lines")
        layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.full(4, 4), latency=latency)
        relaxed = relax(layer)
        assert relaxed is not None and relax(layer, relaxed.bound * 0.99) is None
        bounds.append(relaxed.bound / token_s)
    assert bounds[1:] == pytest.approx([bounds[0]] * 2, rel=1e-5)


def test_the_hottest_expert_bounds_its_gpu_together_with_what_must_be_with_it() -> None:
    cluster = make_cluster([[2, 2]])
    tokens_GLE = np.zeros((2, 1, 4))
    tokens_GLE[:, 0] = [50, 1, 2, 3]
    problem = make_problem(make_spec(1, 4), cluster, tokens_GLE=tokens_GLE)
    layer = Layer(tokens_GE=tokens_GLE[:, 0], room_G=np.array([2, 2]), latency=problem.latency)
    relaxed = relax(layer)
    assert relaxed is not None
    assert relaxed.bound >= 100 + 2  # two tokens of the coldest: every GPU must hold two experts


def test_rounding_keeps_assignment_and_room() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        problem = make_problem(make_spec(1, 12), make_cluster([[12] * 4]), seed=seed)
        layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.full(4, 3), latency=problem.latency)
        relaxed = relax(layer)
        assert relaxed is not None
        for x_EG in (relaxed.x_EG, np.full((12, 4), 0.25)):  # a vertex, and a point with room to walk
            gpu_E = round_layer(layer, x_EG, rng)
            assert np.bincount(gpu_E, minlength=4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("linear", [True, False])
def test_a_step_is_scored_as_the_placement_costs(linear: bool) -> None:
    cluster, bent = _uneven(1)
    latency = unit_latency(cluster) if linear else bent
    problem = make_problem(make_spec(1, 9), cluster, seed=5, latency=latency)
    layer = Layer(tokens_GE=problem.demand.tokens_GLE[:, 0], room_G=np.array([4, 4, 5]), latency=latency)
    descent = Descent(layer, np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    here, there = descent.candidates(range(3))
    scores = descent.scores(here, there)
    for i in np.random.default_rng(0).choice(len(here), 12, replace=False).tolist():
        other = Descent(layer, descent.place())
        other.swap(int(here[i]), int(there[i]))
        assert other.score == pytest.approx(float(scores[i]))
        assert layer.cost(other.place()) == pytest.approx(other.score, rel=1e-5)
    assert descent.run() == pytest.approx(layer.cost(descent.place()))


def test_the_convex_estimate_is_never_above_the_curve() -> None:
    curve = Curve(x=(2.0, 10.0, 30.0), y=(5.0, 6.0, 40.0))
    amounts = np.linspace(0, 60, 301)
    lines = hull(lambda amount: along(curve, amount), np.array([0.0, 1e-6, 2, 10, 30, 60]))
    under = np.max([slope * amounts + cut for slope, cut in lines], axis=0)
    assert (under <= along(curve, amounts) + 1e-9).all()
    assert len(lines) > 1
    assert under[0] == pytest.approx(0)


def test_copies_are_used_where_they_are_nearest() -> None:
    cluster = make_cluster([[4, 4], [4]])
    tokens_GE = np.array([[10.0, 0], [20, 0], [40, 8]])
    placed_GE = np.array([[True, False], [False, True], [False, True]])
    assert flows(cluster, tokens_GE, placed_GE).tolist() == [[10, 0, 0], [20, 0, 0], [40, 0, 8]]
    placed_GE[2, 0] = True
    assert flows(cluster, tokens_GE, placed_GE).tolist() == [[10, 0, 0], [20, 0, 0], [0, 0, 48]]
    assert flows(cluster, tokens_GE, placed_GE, "even").tolist() == [[5, 0, 5], [10, 0, 10], [20, 4, 24]]


def test_prism_gives_by_entropy_hands_on_and_borrows_only_above_e() -> None:
    spec = make_spec(2, 4)
    even, skewed = [1.0, 1, 1, 1], [100.0, 1, 0, 0]
    tokens_GLE = np.array([[even, skewed], [even, skewed]])
    problem = make_problem(spec, make_cluster([[5], [5]]), tokens_GLE=tokens_GLE)
    count_NL = prism.allocate(problem, prism.Options())
    assert count_NL.sum(axis=1).tolist() == [5, 5]  # no slot lost, though 5 * 0.96 would be more than E = 4
    assert count_NL.sum(axis=0).tolist() == [6, 4]  # the skewed layer borrowed until it could cover its experts
    assert prism.entropy(tokens_GLE)[0] == pytest.approx([2.0, 0.0801], abs=1e-3)
    placed_NLE = prism.assign(problem, count_NL)
    assert placed_NLE.any(axis=0).all()


def test_the_largest_remainder_gives_out_everything() -> None:
    assert apportion(7, np.array([1.0, 1.0, 1.0])).tolist() == [3, 2, 2]
    assert apportion(3, np.zeros(2)).tolist() == [2, 1]


def test_three_definitions_of_balance() -> None:
    loads_LG = np.array([[2.0, 4.0], [3.0, 3.0]])
    found = balancedness(loads_LG)
    assert found["sglang"] == pytest.approx((3 / 4 + 1) / 2, abs=1e-5)
    assert found["vllm"] == pytest.approx(6 / 7)
    assert found["tensorrt_llm"] == pytest.approx((1 / 3 + 0) / 2)


def test_scores_by_hand() -> None:
    spec = make_spec(1, 2)
    cluster = make_cluster([[1], [1]])
    tokens_GLE = np.array([[[6.0, 2.0]], [[3.0, 1.0]]])
    problem = make_problem(spec, cluster, tokens_GLE=tokens_GLE)
    placed_GLE = np.array([[[True, False]], [[False, True]]])
    found = score(problem, placed_GLE)
    assert found.local_N == (0.75, 0.25)
    assert (found.local, found.local_mean, found.remote_calls) == (7 / 12, 0.5, 5.0)
    assert (found.comp, found.comm) == (9.0, 6.0)  # GPU 0 computes 9; server 1 sends 3, twice
    width = spec.hidden_size * 2
    assert found.link_bytes == (("s0", "s1", 5.0 * width), ("s1", "s0", 5.0 * width))
    assert found.remote_gap == pytest.approx(0)


@pytest.mark.parametrize(("value", "message"), [(np.nan, "not finite"), (-1.0, "below 0"), (0.0, "all zero")])
def test_loads_that_cannot_be_are_refused(value: float, message: str) -> None:
    spec, cluster = make_spec(1, 2), make_cluster([[2]])
    with pytest.raises(UsageError, match=message):
        Demand(spec=spec, cluster=cluster, tokens_GLE=np.full((1, 1, 2), value))


def test_loads_of_servers_are_split_over_their_gpus() -> None:
    cluster = make_cluster([[2, 2], [2]])
    demand = spread(make_spec(1, 2), cluster, np.array([[[4.0, 2.0]], [[1.0, 0.0]]]))
    assert demand.tokens_GLE.tolist() == [[[2, 1]], [[2, 1]], [[1, 0]]]
    assert demand.frequency_NLE.tolist() == [[[4, 2]], [[1, 0]]]
    with refused(UsageError, 1, 2):
        spread(make_spec(1, 2), cluster, np.ones((1, 1, 2)))


def test_what_planners_refuse() -> None:
    problem = make_problem(make_spec(2, 8), make_cluster([[8], [8]]))
    with refused(UsageError, "prizm", "prism"):
        place("prizm", problem)
    with refused(UsageError, "kick", "director"):
        place("director", problem, {"kick": 1})
    with refused(CapacityError, "c_max 3"):
        place("director", problem, {"c_max": 3})
    with refused(CapacityError, "too many"):
        place("exhaustive", make_problem(make_spec(2, 16), make_cluster([[16], [16]])), {"objective": "latency"})
    with refused(UsageError, "speed"):
        place("exhaustive", problem, {"objective": "speed"})
    with refused(UsageError, "hot", "cold"):
        place("annealing", problem, {"hot": 0.0})
    with refused(UsageError, "seconds"):
        place("director", problem, {"seconds": -1.0})


def test_copies_help_director_where_memory_allows() -> None:
    tokens_GLE = np.full((2, 1, 4), 1.0)
    tokens_GLE[:, 0, 0] = 100
    problem = make_problem(make_spec(1, 4), make_cluster([[3, 3]]), tokens_GLE=tokens_GLE)
    alone, copied = (place("director", problem, {"replicas": b}) for b in (False, True))
    assert copied[:, 0, 0].all()
    assert score(problem, copied, bounds=False).latency < score(problem, alone, bounds=False).latency


@pytest.mark.parametrize("planner", ["director", "annealing"])
def test_a_planner_whose_time_is_over_returns_a_placement(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 1.0)
    problem = make_problem(make_spec(2, 32), make_cluster([[20] * 4]))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    placed = place(planner, problem, {"seconds": 1e-3})
    assert (placed.sum(axis=0) == 1).all()
    assert next(ticks) < 50  # each loop has asked once


def test_programmes_without_an_optimum_in_time_say_so() -> None:
    problem = make_problem(make_spec(2, 32), make_cluster([[20] * 2] * 2))
    with refused(CapacityError, "prism_exact", 128):
        place("prism_exact", problem, {"seconds": 1e-9})
    assert place("prism_exact", problem, {"seconds": 60.0}).any(axis=0).all()


def test_bounds_without_an_optimum_in_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(make_spec(2, 32), make_cluster([[20] * 2] * 2))
    placed = place("uniform", problem)
    whole = score(problem, placed)
    monkeypatch.setattr("moetool.placement.bounds.BOUND_S", 1e-9)
    late = score(problem, placed)
    assert whole.remote_bound is not None and late.remote_bound is None
    assert late.latency_bound == late.memory_bound <= whole.latency_bound


def test_processes_do_not_change_the_placement() -> None:
    problem = make_problem(replace(make_spec(2, 8)), make_cluster([[4, 4], [8]]))
    one, two = (place("director", problem, {"processes": n, "kicks": 2}) for n in (1, 2))
    assert (one == two).all()


@pytest.mark.parametrize("routing", ["nearest", "even"])
def test_tokens_flow_to_the_nearest_copies_or_to_all(routing: str) -> None:
    cluster, rng = make_cluster([[4, 4], [4], [4, 4, 4]]), np.random.default_rng(0)
    server_G = np.array(cluster.server_G)
    for _ in range(50):
        placed_GE, tokens_GE = rng.random((6, 3)) < rng.random(), rng.integers(0, 9, (6, 3)).astype(float)
        expected_GG = np.zeros((6, 6))
        for g, e in np.ndindex(6, 3):
            holders = np.flatnonzero(placed_GE[:, e])
            if routing == "nearest":
                near = holders[server_G[holders] == server_G[g]]
                holders = np.array([g]) if placed_GE[g, e] else near if len(near) else holders
            expected_GG[g, holders] += tokens_GE[g, e] / max(1, len(holders))
        np.testing.assert_allclose(flows(cluster, tokens_GE, placed_GE, routing), expected_GG)
        to_H = np.flatnonzero(rng.random(6) < 0.5)
        np.testing.assert_allclose(flows_to(to_H, server_G, tokens_GE, placed_GE, routing), expected_GG[:, to_H])


@pytest.mark.parametrize("num_servers", [1, 4])
def test_swaps_are_bounded_from_below_and_summed_as_from_scratch(num_servers: int) -> None:
    rng = np.random.default_rng(3)
    cluster = make_cluster([[6] * (8 // num_servers)] * num_servers)
    tokens_GE = rng.integers(0, 50, (8, 32)).astype(float)
    layer = Layer(tokens_GE=tokens_GE, room_G=np.full(8, 6), latency=unit_latency(cluster))
    descent = Descent(layer, np.arange(32) % 8)
    for _ in range(6):
        here, there = descent.candidates(range(8))
        assert (descent.bounds(here, there) <= descent.scores(here, there) + 1e-9).all()
        descent.run(steps=3)
        other = Descent(layer, descent.place())
        np.testing.assert_allclose(descent.flow_GG, other.flow_GG)
        assert (descent.free_G == other.free_G).all() and descent.score == pytest.approx(other.score)


def test_large_layers_go_on_from_the_placement_in_force() -> None:
    rng = np.random.default_rng(1)
    spec = make_spec(layers=2, experts=128)
    cluster = make_cluster([[10] * 8] * 4, slot_bytes=spec.slot_bytes)
    drawn_GLE = rng.poisson(rng.gamma(0.5, 40.0, size=(32, 2, 128))).astype(float)
    problem = make_problem(spec, cluster, tokens_GLE=drawn_GLE)
    before_GLE = place("director", problem, {"quick": True})
    later = replace(problem, demand=replace(problem.demand, tokens_GLE=rng.poisson(drawn_GLE).astype(float)))
    fresh_GLE = place("director", later, {"quick": True})
    warm_GLE = place("director", replace(later, start_GLE=before_GLE), {"quick": True})
    assert (warm_GLE & ~before_GLE).sum() <= 2 * (2 * 12 + 3 * 2) < (fresh_GLE & ~before_GLE).sum()
    cost = {
        name: layers_s(later.latency, cluster, later.demand.tokens_GLE, placed_GLE)
        for name, placed_GLE in (("stay", before_GLE), ("warm", warm_GLE), ("fresh", fresh_GLE))
    }
    assert cost["warm"] < cost["stay"] and cost["warm"] < 1.1 * cost["fresh"]


def test_large_layers_keep_copies_that_help() -> None:
    """GPUs that all hold every expert keep them: the search from one copy of each would end far worse."""
    spec, rng = make_spec(layers=1, experts=64), np.random.default_rng(1)
    cluster = make_cluster([[65] * 4] * 4, slot_bytes=spec.slot_bytes)
    problem = make_problem(spec, cluster, tokens_GLE=rng.gamma(0.5, 40.0, size=(16, 1, 64)))
    whole_GLE = np.ones((16, 1, 64), bool)
    after_GLE = place("director", replace(problem, start_GLE=whole_GLE), {"quick": True})
    assert (after_GLE == whole_GLE).all()
