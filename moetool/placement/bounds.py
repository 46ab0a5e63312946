"""Lower bounds of placements: of remote calls (Prism, Eq. 2) and of T_comp + T_comm (DIRECTOR, Eq. 5)."""

import time
from functools import partial

import numpy as np

from moetool.placement.demand import per_server
from moetool.placement.latency import Latency, along, hull, knots
from moetool.placement.planner import Problem, layer_slots

BOUND_S = 120.0
"""Time limit of a bound."""
RELAXED = 4096
"""Experts times GPUs of a layer up to which its relaxation is solved: larger ones take seconds each."""


def remote_bound(problem: Problem) -> float | None:
    """Return the least remote calls of any placement in the cluster's slots of the largest expert's size.

    None if it takes longer than two minutes.

    Idle servers have no calls: the thousandth of a token per layer that planners count for them is left out.
    """
    from moetool.placement.least_remote import optimum

    demand = problem.demand
    idle = float(demand.frequency_NLE.sum() - demand.tokens_NLE.sum())
    try:
        return max(0.0, optimum(problem, BOUND_S)[0] - idle)
    except TimeoutError:
        return None


def work_bound(problem: Problem) -> float:
    """Return the lower bound of T_comp of any placement, with or without copies, in any memory."""
    latency = problem.latency
    speed, num_gpus = sum(latency.speed_G), len(latency.speed_G)
    total = 0.0
    for load in problem.demand.tokens_LE.sum(axis=1).tolist():
        lines = hull(lambda amount: along(latency.comp, amount), knots(latency.comp, load))
        total += max((slope * load + cut * num_gpus) / speed for slope, cut in lines)
    return total


def memory_bound(problem: Problem) -> float:
    """Return the lower bound of T_comp + T_comm of any placement in this memory, with or without copies.

    To the bound of T_comp it adds traffic. A GPU keeps at most the tokens of the experts that its own tokens use most,
    as many as it holds; the others leave it. Those that no GPU of its server can hold leave the server too. Each leaves
    over the link that costs least. The sum over layers of the slowest GPU's time is at least the time of any one GPU.
    """
    spec, cluster = problem.spec, problem.cluster
    smallest = min(spec.expert_bytes_L)
    slots_G = np.minimum(cluster.slots_G(smallest), spec.total_experts)
    server_G = np.array(cluster.server_G)
    slots_N = np.minimum(per_server(cluster, slots_G[:, None])[:, 0].astype(np.int64), spec.total_experts)
    time_s = 0.0
    for g, tokens_LE in enumerate(problem.demand.tokens_GLE):
        total, most = float(tokens_LE.sum()), float(tokens_LE.sum(axis=1).max())
        kept = np.concatenate([[0.0], np.cumsum(-np.sort(-tokens_LE, axis=None))])
        away, beyond = (total - float(kept[min(slots, len(kept) - 1)]) for slots in (slots_G[g], slots_N[server_G[g]]))
        near, far = (
            _least_slope(problem.latency, g, here_G, most)
            for here_G in (server_G == server_G[g], server_G != server_G[g])
        )
        if near is None or far is None or far < near:
            least = min((slope for slope in (near, far) if slope is not None), default=0.0)
            time_s = max(time_s, least * away)
        else:
            time_s = max(time_s, near * (away - beyond) + far * beyond)
    return work_bound(problem) + problem.latency.ways * time_s


def _least_slope(latency: Latency, g: int, where_G: np.ndarray, most: float) -> float | None:
    """Return the least seconds per token of GPU g's links to some GPUs, for at most `most` tokens; None without a link.

    A convex under-estimate of a link's curve starts with its least slope.
    """
    slopes = []
    for kind in np.unique(latency.link_GG[g, where_G & (np.arange(len(where_G)) != g)]).tolist():
        cost = partial(latency.link_s, link_X=np.array(kind))
        slopes.append(max(0.0, hull(cost, knots(latency.links[kind], most, latency.token_bytes))[0][0]))
    return min(slopes, default=None)


def latency_bound(problem: Problem, *placed_GLE: np.ndarray, c_max: int = 0, relaxed: int = RELAXED) -> float:
    """Return a bound of T_comp + T_comm for all of these placements (`PlacementScore.latency_bound`).

    Args:
        relaxed: experts times GPUs of a layer up to which its relaxation is solved.
    """
    latency, demand = problem.latency, problem.demand
    least = memory_bound(problem)
    copied = any((one_GLE.sum(axis=0) > 1).any() for one_GLE in placed_GLE)
    if copied or demand.tokens_GLE[:, 0].size > relaxed:
        return least
    from moetool.placement.local_search import Layer
    from moetool.placement.relaxation import relax

    # Allow the layer counts of this placement, even if `layer_slots` would not give them.
    room_GL = np.maximum.reduce([layer_slots(problem, c_max), *(one_GLE.sum(axis=2) for one_GLE in placed_GLE)])
    total, until = 0.0, time.perf_counter() + BOUND_S
    for i, num_experts in enumerate(problem.spec.num_experts_L):
        layer = Layer(tokens_GE=demand.tokens_GLE[:, i, :num_experts], room_G=room_GL[:, i], latency=latency)
        try:
            found = relax(layer, until=until)
        except TimeoutError:
            return least
        assert found is not None, "without a budget the relaxation has a solution"
        total += found.bound
    return max(least, total)
