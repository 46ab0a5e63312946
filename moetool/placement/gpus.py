"""Assignment of servers' experts to their GPUs, and copies of the busiest."""

import heapq

import numpy as np

from moetool.placement.planner import Problem


def pack_servers(problem: Problem, placed_NLE: np.ndarray) -> np.ndarray:
    """Spread each server's experts over its GPUs, each layer as evenly as memory allows.

    The experts of a layer, most used first, go to the GPU with room that has the least load of that layer. A GPU's room
    for a layer is its share of the server's slots, rounded so that every later expert has room. With equal slots of
    each layer and more of them on a server than experts, the rest holds copies of the busiest, as in EPLB.

    Shapes: placed_NLE bool -> placed_GLE bool.
    """
    demand, slots_G = problem.demand, problem.slots_G
    server_G = np.array(problem.cluster.server_G)
    speed_G = [gpu.speed for gpu in problem.cluster.gpus]
    tokens_NLE = demand.tokens_NLE
    placed_GLE = np.zeros(demand.tokens_GLE.shape, bool)
    for n, placed_LE in enumerate(placed_NLE):
        gpus = np.flatnonzero(server_G == n)
        left = slots_G[gpus].astype(np.int64)
        remaining = int(placed_LE.sum())
        copied = 0 < placed_LE.sum(axis=1).max() <= problem.equal_slots * len(gpus)
        for layer, placed_E in enumerate(placed_LE):
            experts = np.flatnonzero(placed_E)
            used_X = np.maximum(tokens_NLE[n, layer, experts], 1e-9)
            copies = np.arange(len(experts))
            if copied and len(experts):
                room = np.full(len(gpus), problem.equal_slots)
                copies = replicate(used_X, int(room.sum()), len(gpus))
            else:
                room = np.floor(left * len(experts) / max(1, remaining)).astype(np.int64)
                for _ in range(len(experts) - int(room.sum())):
                    short = left - room * remaining / max(1, len(experts))
                    room[int(np.where(room < left, short, -np.inf).argmax())] += 1
                left -= room
                remaining -= len(experts)
            load_X = (used_X / np.bincount(copies, minlength=len(experts)))[copies]
            lightest = [(0.0, g, slots) for g, slots in zip(gpus.tolist(), room.tolist(), strict=True) if slots]
            held: set[tuple[int, int]] = set()
            order = np.argsort(-load_X, kind="stable")
            for expert, used in zip(experts[copies[order]].tolist(), load_X[order].tolist(), strict=True):
                passed = []
                while lightest and (lightest[0][1], expert) in held:
                    passed.append(heapq.heappop(lightest))
                if lightest:  # else every GPU with room has this expert, and the copy is left out
                    load, g, slots = heapq.heappop(lightest)
                    held.add((g, expert))
                    placed_GLE[g, layer, expert] = True
                    if slots > 1:
                        passed.append((load + used / speed_G[g], g, slots - 1))
                for item in passed:
                    heapq.heappush(lightest, item)
    return placed_GLE


def replicate(tokens_E: np.ndarray, num_slots: int, most: int | None = None) -> np.ndarray:
    """Return the expert of each copy: each once, then repeatedly that with the most load per copy, up to `num_slots`.

    Args:
        most: maximum copies of an expert.
    """
    loads, count_E = tokens_E.tolist(), [1] * len(tokens_E)
    copies = list(range(len(loads)))
    heaviest = [(-load, expert) for expert, load in enumerate(loads)] if most is None or most > 1 else []
    heapq.heapify(heaviest)
    while len(copies) < num_slots and heaviest:
        expert = heaviest[0][1]
        copies.append(expert)
        count_E[expert] += 1
        if count_E[expert] == most:
            heapq.heappop(heaviest)
        else:
            heapq.heapreplace(heaviest, (-loads[expert] / count_E[expert], expert))
    return np.array(copies)
