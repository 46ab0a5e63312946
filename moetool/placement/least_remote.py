"""The least remote calls of any placement: Prism's Eq. 2 as a linear programme, solved exactly."""

import math
import time

import numpy as np

from moetool.placement.demand import per_server
from moetool.placement.planner import Problem


def optimum(problem: Problem, seconds: float = 0.0) -> tuple[float, np.ndarray]:
    """Return (Eq. 2 at its optimum, placed_NLE).

    Args:
        seconds: time limit (0: none).

    Raises:
        TimeoutError: there is no optimum by then.
    """
    from scipy.sparse import csc_matrix

    from moetool.placement.linear_programme import minimise

    frequency_NLE, exists_LE = problem.demand.frequency_NLE, problem.exists_LE
    num_servers = len(frequency_NLE)
    slots_N = per_server(problem.cluster, problem.slots_G)
    value_NX = frequency_NLE[:, exists_LE]
    num_experts = value_NX.shape[1]
    columns = num_servers * num_experts
    # Column (server, expert) has a 1 in the row of the expert and a 1 in the row of the server.
    rows = np.empty((columns, 2), np.int32)
    rows[:, 0] = np.tile(np.arange(num_experts), num_servers)
    rows[:, 1] = num_experts + np.repeat(np.arange(num_servers), num_experts)
    matrix = csc_matrix(
        (np.ones(2 * columns), rows.ravel(), np.arange(0, 2 * columns + 1, 2)),
        shape=(num_experts + num_servers, columns),
    )
    infinite = np.full(num_experts, np.inf)
    solution = minimise(
        -value_NX.ravel(),
        matrix,
        np.concatenate([np.ones(num_experts), np.zeros(num_servers)]),
        np.concatenate([infinite, slots_N]),
        np.zeros(columns),
        np.ones(columns),
        time.perf_counter() + seconds if seconds else math.inf,
    )
    assert solution is not None, "Problem has checked that every expert fits"
    chosen_NX = solution.x.reshape(num_servers, num_experts)
    assert (np.abs(chosen_NX - np.round(chosen_NX)) < 1e-6).all(), "a vertex of a network programme is integral"
    placed_NLE = np.zeros(frequency_NLE.shape, bool)
    placed_NLE[:, exists_LE] = chosen_NX > 0.5
    return float(frequency_NLE.sum() + solution.value), placed_NLE
