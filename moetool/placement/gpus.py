"""Assignment of servers' experts to their GPUs."""

import heapq

import numpy as np

from moetool.placement.planner import Problem


def pack_servers(problem: Problem, placed_NLE: np.ndarray) -> np.ndarray:
    """Spread each server's experts over its GPUs, each layer as evenly as memory allows.

    The experts of a layer, most used first, go to the GPU with room that has the least load of that layer. A GPU's room
    for a layer is its share of the server's slots, rounded so that every later expert has room.

    Shapes: placed_NLE bool -> placed_GLE bool.
    """
    demand, slots_G = problem.demand, problem.slots_G
    server_G = np.array(problem.cluster.server_G)
    speed_G = np.array([gpu.speed for gpu in problem.cluster.gpus])
    tokens_NLE = demand.tokens_NLE
    placed_GLE = np.zeros(demand.tokens_GLE.shape, bool)
    for n, placed_LE in enumerate(placed_NLE):
        gpus = np.flatnonzero(server_G == n)
        left = slots_G[gpus].astype(np.int64)
        remaining = int(placed_LE.sum())
        for layer, placed_E in enumerate(placed_LE):
            experts = np.flatnonzero(placed_E)
            room = np.floor(left * len(experts) / max(1, remaining)).astype(np.int64)
            for _ in range(len(experts) - int(room.sum())):
                room[int(np.where(room < left, left - room * remaining / max(1, len(experts)), -np.inf).argmax())] += 1
            left -= room
            remaining -= len(experts)
            lightest = [(0.0, g) for g in range(len(gpus)) if room[g]]
            used_E = np.maximum(tokens_NLE[n, layer], 1e-9)
            for expert in experts[np.argsort(-tokens_NLE[n, layer, experts], kind="stable")].tolist():
                load, g = lightest[0]
                placed_GLE[gpus[g], layer, expert] = True
                room[g] -= 1
                if room[g]:
                    heapq.heapreplace(lightest, (load + float(used_E[expert]) / speed_G[gpus[g]], g))
                else:
                    heapq.heappop(lightest)
    return placed_GLE
