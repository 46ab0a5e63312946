"""The least remote calls of any placement: Prism's Eq. 2 as a linear programme, solved exactly."""

import heapq
import math
import time

import numpy as np

from moetool.placement.demand import per_server
from moetool.placement.linear_programme import SparseMatrix, minimise
from moetool.placement.planner import Problem


def optimum(problem: Problem, seconds: float = 0.0) -> tuple[float, np.ndarray]:
    """Return (Eq. 2 at its optimum, placed_NLE).

    With equal slots of each layer, each layer is a programme of its own, and servers' free slots get the experts that
    they use most.

    Args:
        seconds: time limit (0: none).

    Raises:
        TimeoutError: there is no optimum by then.
    """
    frequency_NLE, exists_LE = problem.demand.frequency_NLE, problem.exists_LE
    until = time.perf_counter() + seconds if seconds else math.inf
    placed_NLE = np.zeros(frequency_NLE.shape, bool)
    if not problem.equal_slots:
        slots_N = per_server(problem.cluster, problem.slots_G)
        placed_NLE[:, exists_LE] = _chosen(frequency_NLE[:, exists_LE], slots_N, until)
        return float((frequency_NLE * ~placed_NLE).sum()), placed_NLE
    slots_N = problem.equal_slots * np.bincount(problem.cluster.server_G)
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        frequency_NE, placed_NE = frequency_NLE[:, layer, :num_experts], placed_NLE[:, layer, :num_experts]
        placed_NE[:] = _chosen(frequency_NE, slots_N, until)
        for n, slots in enumerate(np.minimum(slots_N, num_experts).tolist()):
            missing = np.argsort(np.where(placed_NE[n], 1.0, -frequency_NE[n]), kind="stable")
            placed_NE[n, missing[: slots - int(placed_NE[n].sum())]] = True
    return float((frequency_NLE * ~placed_NLE).sum()), placed_NLE


def _dealt(value_X: np.ndarray, num_servers: int, slots: int) -> np.ndarray:
    """Return the experts [N, X] of equal servers with the same use, as of counts: the optimum without a programme.

    The most used experts are on all servers, as many as leave room for one copy of each other. One more may be on some.
    The others are dealt to the server with the least use and room.
    """
    placed_NX = np.zeros((num_servers, len(value_X)), bool)
    order = np.argsort(-value_X, kind="stable")
    more = min(num_servers * slots - len(value_X), len(value_X) * (num_servers - 1))
    everywhere, rest = divmod(more, max(1, num_servers - 1))
    placed_NX[:, order[:everywhere]] = True
    if rest:
        placed_NX[: rest + 1, order[everywhere]] = True
    room_N = (slots - placed_NX.sum(axis=1)).tolist()
    least = [(load, server) for server, load in enumerate((placed_NX @ value_X).tolist()) if room_N[server]]
    heapq.heapify(least)
    for expert in order[everywhere + (rest > 0) :].tolist():
        load, server = least[0]
        placed_NX[server, expert] = True
        room_N[server] -= 1
        if room_N[server]:
            heapq.heapreplace(least, (load + float(value_X[expert]), server))
        else:
            heapq.heappop(least)
    return placed_NX


def _chosen(value_NX: np.ndarray, slots_N: np.ndarray, until: float) -> np.ndarray:
    """Return the experts [N, X] of each server that are worth most, with each expert on a server at least."""
    num_servers, num_experts = value_NX.shape
    if len(set(slots_N.tolist())) == 1 and (value_NX == value_NX[0]).all():
        return _dealt(value_NX[0], num_servers, int(slots_N[0]))
    columns = num_servers * num_experts
    # Column (server, expert) has a 1 in the row of the expert and a 1 in the row of the server.
    rows = np.empty((columns, 2), np.int32)
    rows[:, 0] = np.tile(np.arange(num_experts), num_servers)
    rows[:, 1] = num_experts + np.repeat(np.arange(num_servers), num_experts)
    matrix = SparseMatrix(
        starts=np.arange(0, 2 * columns + 1, 2), index=rows.ravel(), value=np.ones(2 * columns), by_row=False
    )
    infinite = np.full(num_experts, np.inf)
    solution = minimise(
        -value_NX.ravel(),
        matrix,
        np.concatenate([np.ones(num_experts), np.zeros(num_servers)]),
        np.concatenate([infinite, slots_N]),
        np.zeros(columns),
        np.ones(columns),
        until,
    )
    assert solution is not None, "Problem has checked that every expert fits"
    chosen_NX = solution.x.reshape(num_servers, num_experts)
    assert (np.abs(chosen_NX - np.round(chosen_NX)) < 1e-6).all(), "a vertex of a network programme is integral"
    return np.asarray(chosen_NX > 0.5)
