"""Servers' experts on their GPUs: evenly, with copies where an engine's equal slots leave room for them."""

import numpy as np
import pytest

from moetool.base.types import Cluster
from moetool.placement.demand import spread
from moetool.placement.gpus import pack_servers
from moetool.placement.latency import layers_s, linear_latency, unit_latency
from moetool.placement.planner import Problem, filled, place
from moetool.placement.planners.prism_exact import Options
from tests.clusters import make_cluster
from tests.synthetic import make_spec


def _problem(tokens_E: list[float] | np.ndarray, cluster: Cluster, slots: int) -> Problem:
    """One layer, whose tokens come evenly from all servers."""
    tokens_NLE = np.tile(np.array(tokens_E, float), (len(cluster.servers), 1, 1))
    demand = spread(make_spec(1, tokens_NLE.shape[2]), cluster, tokens_NLE)
    return Problem(demand=demand, latency=unit_latency(cluster), equal_slots=slots)


def test_slots_beyond_the_experts_hold_copies_of_the_busiest() -> None:
    cluster = make_cluster([[3, 3]])
    everything_NLE = np.ones((1, 1, 4), bool)
    held_GE = pack_servers(_problem([8, 4, 2, 2], cluster, 3), everything_NLE)[:, 0]
    assert held_GE[:, :2].all() and sorted(held_GE[:, 2:].tolist()) == [[False, True], [True, False]]
    held_GE = pack_servers(_problem([8, 4, 2, 2], make_cluster([[2, 2]]), 2), everything_NLE)[:, 0]
    assert held_GE.tolist() == [[True, False, False, True], [False, True, True, False]]  # memory for no copy
    held_GE = pack_servers(_problem([8, 4, 2, 2], cluster, 0), everything_NLE)[:, 0]
    assert held_GE.sum() == 4


@pytest.mark.parametrize("seed", range(5))
def test_more_slots_do_not_make_a_layer_slower(seed: int) -> None:
    tokens_E = 1e4 * np.random.default_rng(seed).permutation(1.0 / np.arange(1, 33))
    times = []
    for slots in (4, 5, 6, 8):  # two servers, each with room for all experts and 0, 8, 16 and 32 copies
        problem = _problem(tokens_E, make_cluster([[slots] * 8] * 2), slots)
        placed_GLE = filled(problem, place("prism_exact", problem, Options()), slots, "prism_exact")
        assert (placed_GLE.sum(axis=2) == slots).all()
        computing = linear_latency(problem.cluster, 1.0, 0.0, 0.0, "computing alone")
        times.append(layers_s(computing, problem.cluster, problem.demand.tokens_GLE, placed_GLE) * 8 / tokens_E.sum())
    assert times[0] > 2 and max(times[1:]) < 1.05, "the busiest GPU by the mean"
