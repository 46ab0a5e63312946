"""Exhaustive search over every placement, for tiny cases and as the tests' oracle."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from moetool.base.errors import CapacityError, UsageError
from moetool.placement.gpus import pack_servers
from moetool.placement.latency import flows
from moetool.placement.planner import Problem, layer_slots

_MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the search.

    Attributes:
        objective: `remote` (Prism's Eq. 2, any number of copies on servers) or `latency` (DIRECTOR's T_comp + T_comm,
            one copy each).
        c_max: for `latency`, maximum experts of a layer on a GPU (0: as memory allows).
    """

    objective: str = "remote"
    c_max: int = 0


def place(problem: Problem, options: Options) -> np.ndarray:
    """Return the best of all placements (ties: the first).

    Shapes: placed_GLE bool.

    Raises:
        UsageError: the objective is unknown.
        CapacityError: there are too many placements.
    """
    if options.objective == "remote":
        return pack_servers(problem, _least_remote(problem))
    if options.objective == "latency":
        return _least_latency(problem, options.c_max)
    raise UsageError(f"unknown objective {options.objective!r} of exhaustive, expected remote or latency")


def _refuse(count: float) -> None:
    if count > _MOST:
        raise CapacityError(f"{count:.2g} placements are too many to try, at most {_MOST:,}; use another planner")


def _least_remote(problem: Problem) -> np.ndarray:
    """Try every set of servers for every expert by dynamic programming: only memory couples experts."""
    frequency_NLE = problem.demand.frequency_NLE
    server_G = np.array(problem.cluster.server_G)
    slots = tuple(int(problem.slots_G[server_G == n].sum()) for n in range(len(frequency_NLE)))
    subsets = [s for s in itertools.product((0, 1), repeat=len(slots)) if any(s)]
    experts = [tuple(place) for place in np.argwhere(problem.exists_LE).tolist()]
    _refuse(len(experts) * len(subsets) * math.prod(room + 1 for room in slots))
    best: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {slots: (0.0, ())}
    for layer, expert in experts:
        after: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        for left, (value, choices) in best.items():
            for i, subset in enumerate(subsets):
                rest = tuple(room - used for room, used in zip(left, subset, strict=True))
                if min(rest) < 0:
                    continue
                gained = value + sum(frequency_NLE[n, layer, expert] for n, used in enumerate(subset) if used)
                if rest not in after or gained > after[rest][0]:
                    after[rest] = (gained, (*choices, i))
        best = after
    _, choices = max(best.values(), key=lambda found: found[0])
    placed_NLE = np.zeros(frequency_NLE.shape, bool)
    for (layer, expert), choice in zip(experts, choices, strict=True):
        placed_NLE[:, layer, expert] = subsets[choice]
    return placed_NLE


def _least_latency(problem: Problem, c_max: int) -> np.ndarray:
    room_GL = layer_slots(problem, c_max)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    num_gpus = len(room_GL)
    _refuse(sum(float(num_gpus) ** num_experts for num_experts in problem.spec.num_experts_L))
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE = problem.demand.tokens_GLE[:, layer, :num_experts]
        best = math.inf
        found: tuple[int, ...] = ()
        for gpus in itertools.product(range(num_gpus), repeat=num_experts):
            if (np.bincount(gpus, minlength=num_gpus) > room_GL[:, layer]).any():
                continue
            placed_GE = np.arange(num_gpus)[:, None] == np.array(gpus)
            cost = sum(problem.latency.layer(flows(problem.cluster, tokens_GE, placed_GE)))
            if cost < best:
                best, found = cost, gpus
        placed_GLE[list(found), layer, np.arange(num_experts)] = True
    return placed_GLE
