"""DIRECTOR's linear relaxation of one layer: a bound with one copy each, and the start of rounding."""

import math
from dataclasses import dataclass

import numpy as np

from moetool.placement.latency import along, hull, knots
from moetool.placement.linear_programme import SparseMatrix, minimise
from moetool.placement.local_search import Layer

Row = tuple[np.ndarray, np.ndarray, float, float]
"""A row of the programme: columns, their values, lower and upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The relaxed optimum of a layer.

    Attributes:
        bound: bound of T_comp + T_comm, with one copy of each expert and at most `room_G` on a GPU.
        x_EG: the share of each expert on each GPU.
    """

    bound: float
    x_EG: np.ndarray


def relax(layer: Layer, budget: float | None = None, until: float = math.inf) -> Relaxed | None:
    """Solve Eq. 6 for one layer; None if infeasible within `budget`.

    Args:
        budget: find a solution within this T_comp + T_comm, as the printed programme does (None: minimize it).
        until: end of the time for it, in seconds of `time.perf_counter`.

    Raises:
        TimeoutError: there is no solution by then.

    Source: DIRECTOR § VI-C, Eqs. 6a to 6g. Deviations:
        - Each constraint except 6b concerns one layer and the objective is a sum, so each layer is minimised by itself.
        - Convex under-estimates of f_comp and f_comm, so that the value is a bound (`moetool.placement.latency.hull`).
        - Sum of x = 1 (6e has >= 1, under which a copy would double an expert's work).
        - tau_comp >= the time of the hottest expert with the coldest experts that do not fit on other GPUs. Without
          this row the relaxation splits the hottest expert.
        - Times in seconds are solved as multiples of a GPU's mean time, since HiGHS ignores differences below 1e-7.
        - With `sides="both"`, receiving bounds tau_comm too, and tau_comm counts twice. The same repair for Eq. 6d then
          holds: tau_comm >= the receive time of any expert with its coldest company, on its best GPU.
    """
    latency, tokens_GE, room_G = layer.latency, layer.tokens_GE, layer.room_G
    num_gpus, num_experts = tokens_GE.shape
    total_E, total_G = tokens_GE.sum(axis=0), tokens_GE.sum(axis=1)
    whole = float(total_E.sum())
    comp, comm = num_experts * num_gpus, num_experts * num_gpus + 1
    rows: list[Row] = []
    x = np.arange(num_experts * num_gpus).reshape(num_experts, num_gpus)
    ones_G, ones_E = np.ones(num_gpus), np.ones(num_experts)
    rows += [(x[i], ones_G, 1.0, 1.0) for i in range(num_experts)]
    rows += [(x[:, k], ones_E, -np.inf, float(room_G[k])) for k in range(num_gpus)]

    for slope, intercept in hull(lambda amount: along(latency.comp, amount), knots(latency.comp, whole)):
        for k in range(num_gpus):
            rate = slope / latency.speed_G[k]
            rows.append((_and(x[:, k], comp), _and(-rate * total_E, 1.0), intercept / latency.speed_G[k], np.inf))

    # Links: one line per pair if the hull is one line, else a column for the pair's time.
    lines = {}
    for j in range(num_gpus):
        for k in range(num_gpus):
            if j != k:
                lines[j, k] = _lines(layer, j, k, float(total_G[j]))
    columns = comm + 1
    time_of: dict[tuple[int, int], int] = {}
    slope_GG = np.zeros((num_gpus, num_gpus))
    for (j, k), pieces in lines.items():
        if len(pieces) == 1:
            slope_GG[j, k] = pieces[0][0]
            continue
        time_of[j, k] = columns
        for slope, intercept in pieces:
            rows.append((_and(x[:, k], columns), _and(-slope * tokens_GE[j], 1.0), intercept, np.inf))
        columns += 1
    for j in range(num_gpus):
        others = np.delete(slope_GG[j], j)
        values, counts = np.unique(others, return_counts=True)
        base = float(values[counts.argmax()]) if len(values) else 0.0  # sum of x = 1: only other rows need entries
        index, value = [np.array([comm])], [np.ones(1)]
        for k in range(num_gpus):
            if slope_GG[j, k] != base:
                index.append(x[:, k])
                value.append((base - slope_GG[j, k]) * tokens_GE[j])
            if (j, k) in time_of:
                index.append(np.array([time_of[j, k]]))
                value.append(-np.ones(1))
        rows.append((np.concatenate(index), np.concatenate(value), base * float(total_G[j]), np.inf))
    if latency.sides == "both":
        for k in range(num_gpus):
            ways = [time_of[j, k] for j in range(num_gpus) if (j, k) in time_of]
            received = np.concatenate([-(slope_GG[:, k] @ tokens_GE), [1.0], -np.ones(len(ways))])
            rows.append((np.concatenate([x[:, k], [comm], np.array(ways, np.int64)]), received, 0.0, np.inf))
    if budget is not None:
        rows.append((np.array([comp, comm]), np.array([1.0, latency.ways]), -np.inf, budget))

    cost = np.zeros(columns)
    if budget is None:
        cost[comp], cost[comm] = 1.0, latency.ways
    lower, upper = np.zeros(columns), np.ones(columns)
    upper[comp:] = np.inf
    lower[comp] = hottest(layer)
    if latency.sides == "both":
        first_GG = np.zeros((num_gpus, num_gpus))
        for (j, k), pieces in lines.items():
            first_GG[j, k] = max(0.0, pieces[0][0])
        lower[comm] = most_received(layer, tokens_GE.T @ first_GG)
    unit = _unit(layer, whole)
    rows = [_in_units(row, comp, unit) for row in rows]
    lower[comp:] /= unit
    starts = np.concatenate([[0], np.cumsum([len(row[0]) for row in rows])])
    matrix = SparseMatrix(
        starts=starts,
        index=np.concatenate([row[0] for row in rows]),
        value=np.concatenate([row[1] for row in rows]),
        by_row=True,
    )
    row_lower, row_upper = np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
    solution = minimise(cost, matrix, row_lower, row_upper, lower, upper, until)
    if solution is None:
        return None
    value = unit * (solution.x[comp] + latency.ways * solution.x[comm])
    return Relaxed(bound=float(value), x_EG=np.clip(solution.x[:comp], 0.0, 1.0).reshape(num_experts, num_gpus))


def _unit(layer: Layer, whole: float) -> float:
    """Return the unit of the programme's times: 1 token, or the seconds that a GPU takes for the mean load."""
    if layer.latency.unit != "s":
        return 1.0
    mean = np.array([whole / len(layer.room_G)])
    return float(along(layer.latency.comp, mean)[0]) or 1.0


def _in_units(row: Row, first_time: int, unit: float) -> Row:
    """Return a row with its times, in columns from `first_time` on, in units; other rows are unchanged."""
    columns, values, low, high = row
    if columns.max() < first_time:
        return row
    return columns, np.where(columns < first_time, values / unit, values), low / unit, high / unit


def hottest(layer: Layer) -> float:
    """Return the least time of a GPU with the hottest expert and the coldest experts that do not fit on other GPUs.

    If the curve falls, more tokens than these may take less time.
    """
    total_E, room_G, latency = np.sort(layer.tokens_GE.sum(axis=0)), layer.room_G, layer.latency
    knots_X = knots(latency.comp, float(total_E.sum()))
    times = []
    for k, room in enumerate(room_G.tolist()):
        if room > 0:
            forced = max(1, len(total_E) - int(room_G.sum() - room))
            load = float(total_E[-1] + total_E[: forced - 1].sum())
            more_X = np.append(knots_X[knots_X > load], load)
            times.append(float(along(latency.comp, more_X).min()) / latency.speed_G[k])
    return min(times)


def most_received(layer: Layer, received_EG: np.ndarray) -> float:
    """Return the least receive time of some GPU: that of the worst expert in its best place.

    Shapes: received_EG, the time of each expert's tokens to each GPU.
    """
    room_G, num_experts = layer.room_G, len(received_EG)
    sums_XG = np.concatenate([np.zeros((1, len(room_G))), np.cumsum(np.sort(received_EG, axis=0), axis=0)])
    company_G = np.clip(num_experts - (room_G.sum() - room_G), 1, num_experts) - 1
    least_EG = received_EG + sums_XG[company_G, np.arange(len(room_G))]
    return float(np.where(room_G > 0, least_EG, np.inf).min(axis=1).max())


def _lines(layer: Layer, j: int, k: int, most: float) -> list[tuple[float, float]]:
    """Return the under-estimate of f_comm from j to k, against tokens."""
    latency = layer.latency
    curve = latency.links[int(latency.link_GG[j, k])]
    link = np.array(latency.link_GG[j, k])
    return hull(lambda tokens: latency.link_s(tokens, link), knots(curve, most, latency.token_bytes))


def _and(many: np.ndarray, one: float) -> np.ndarray:
    return np.append(many, one)
