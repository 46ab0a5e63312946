"""Properties of every planner: coverage, memory, determinism, and the bounds that no placement beats."""

from dataclasses import replace

import numpy as np
import pytest

from moetool.base import plugins
from moetool.base.errors import CapacityError
from moetool.base.types import Gpu
from moetool.placement.planner import layer_slots, place
from moetool.placement.scoring import score
from tests.clusters import make_cluster, make_problem
from tests.refusals import refused
from tests.synthetic import make_spec

PLANNERS = plugins.names("planner")
OPTIONS = {"annealing": {"steps": 100}, "director": {"kicks": 1}}

CASES = {
    "one server, one GPU": (make_spec(2, 8), [[16]]),
    "nothing to spare": (make_spec(2, 8), [[4, 4], [8]]),
    "unequal GPUs": (make_spec(3, 8), [[10], [6, 9], [7]]),
    "E not divisible": (make_spec(2, 7), [[6], [6], [6]]),
    "everything everywhere": (make_spec(2, 6), [[12], [12, 30]]),
    "many small GPUs": (make_spec(2, 6), [[1, 2, 3], [2, 3, 4]]),
}


def _tiny(name: str, case: str) -> bool:
    return name != "exhaustive" or case in ("one server, one GPU", "nothing to spare", "E not divisible")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PLANNERS)
def test_covers_fits_repeats_and_keeps_the_bounds(name: str, case: str) -> None:
    spec, slots = CASES[case]
    if not _tiny(name, case):
        pytest.skip("too many placements to try")
    for seed in range(2):
        problem = make_problem(spec, make_cluster(slots), seed=seed)
        placed_GLE = place(name, problem, OPTIONS.get(name))  # `place` checks coverage and memory
        assert (placed_GLE == place(name, problem, OPTIONS.get(name))).all()
        found = score(problem, placed_GLE)
        assert found.remote_bound is not None and found.latency_bound is not None
        assert found.remote_calls >= found.remote_bound - 1e-6
        assert found.latency >= found.latency_bound - 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_plan_of_one_planner_bounds_those_of_the_others_as_far_as_it_says(case: str) -> None:
    spec, slots = CASES[case]
    problem = make_problem(spec, make_cluster(slots), seed=4)
    names = [name for name in PLANNERS if _tiny(name, case)]
    plans = {name: place(name, problem, OPTIONS.get(name)) for name in names}
    plans["hand-made"] = np.zeros_like(plans["uniform"])  # one copy each, the layers shared unlike any planner
    room_G = problem.slots_G.copy()
    for layer, expert in np.argwhere(problem.exists_LE).tolist():
        gpu = int(np.flatnonzero(room_G)[0])
        plans["hand-made"][gpu, layer, expert] = True
        room_G[gpu] -= 1
    scores = {name: score(problem, placed_GLE) for name, placed_GLE in plans.items()}
    for name, found in scores.items():
        assert found.remote_bound is not None and found.memory_bound is not None and found.latency_bound is not None
        single = (plans[name].sum(axis=0) <= 1).all()
        room_GL = np.maximum(layer_slots(problem), plans[name].sum(axis=2))
        for other, theirs in scores.items():
            assert theirs.remote_calls >= found.remote_bound - 1e-6, (name, other)
            assert theirs.latency >= found.memory_bound - 1e-6, (name, other)
            alike = (plans[other].sum(axis=0) <= 1).all() and (plans[other].sum(axis=2) <= room_GL).all()
            if not single or alike:
                assert theirs.latency >= found.latency_bound - 1e-6, (name, other)


@pytest.mark.parametrize("name", PLANNERS)
def test_one_expert_too_few_is_refused_with_the_shortfall(name: str) -> None:
    with refused(CapacityError, "15", "16", "1", "1,000"):
        place(name, make_problem(make_spec(2, 8), make_cluster([[7], [8]])))


@pytest.mark.parametrize("name", PLANNERS)
def test_an_idle_server_is_served_like_any(name: str) -> None:
    spec, cluster = make_spec(2, 6), make_cluster([[8], [8]])
    problem = make_problem(spec, cluster)
    tokens_GLE = problem.demand.tokens_GLE.copy()
    tokens_GLE[1] = 0
    idle = make_problem(spec, cluster, tokens_GLE=tokens_GLE)
    found = score(idle, place(name, idle, OPTIONS.get(name)))
    assert found.local_N[1] is None
    assert found.local_mean == found.local_N[0]


@pytest.mark.parametrize("name", PLANNERS)
def test_layers_of_different_width_are_planned_too(name: str) -> None:
    spec = replace(make_spec(3, 6), num_experts_L=(6, 3, 5))
    place(name, make_problem(spec, make_cluster([[6], [5, 6]])), OPTIONS.get(name))


@pytest.mark.parametrize("seed", range(20))
def test_the_slots_of_layers_cover_every_layer_whenever_there_is_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = replace(make_spec(4, 9), num_experts_L=tuple(rng.integers(1, 10, size=4).tolist()))
    cuts = np.sort(rng.integers(0, spec.total_experts + 1, size=3))
    slots = np.diff([0, *cuts, spec.total_experts])  # not one slot more than needed
    cluster = make_cluster([slots.tolist()])
    given_GL = layer_slots(make_problem(spec, cluster, seed=seed))
    assert (given_GL.sum(axis=0) == spec.num_experts_L).all()
    assert (given_GL.sum(axis=1) == slots).all()


def test_a_faster_gpu_gets_more_work_from_the_balancers() -> None:
    spec = make_spec(2, 8)
    cluster = make_cluster([[8, 8]])
    server = cluster.servers[0]
    gpus = (Gpu(memory_bytes=8000, speed=3.0), server.gpus[1])
    fast = replace(cluster, servers=(replace(server, gpus=gpus),))
    for name, options in (("eplb", {}), ("smartmoe", {}), ("director", {"kicks": 2})):
        problem = make_problem(spec, fast, seed=3)
        placed_GLE = place(name, problem, options)
        work_G = (placed_GLE * problem.demand.tokens_LE / placed_GLE.sum(axis=0)).sum(axis=(1, 2))
        assert work_G[0] > work_G[1], name
