"""SmartMoE: equal numbers of experts on every GPU, chosen for equal load."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.planner import Problem, layer_slots
from moetool.placement.planners.uniform import even_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options."""


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place one copy of each expert, in the order of falling load, on the least loaded GPU with room.

    Shapes: placed_GLE bool.

    Source: the placement of SmartMoE (ATC '23), as Prism § IV-A uses it: it balances the load while every GPU holds
    the same number of experts. Its search among parallel strategies and its online swaps belong to training and are
    left out. On GPUs of unequal speed it balances time.
    """
    room_GL = layer_slots(problem)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    tokens_LE = problem.demand.tokens_LE
    speed_G = np.array([gpu.speed for gpu in problem.cluster.gpus])
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        share_G = even_shares(num_experts, room_GL[:, layer])
        gpu_E = balance(tokens_LE[layer, :num_experts], share_G, speed_G)
        placed_GLE[gpu_E, layer, np.arange(num_experts)] = True
    return placed_GLE


def balance(tokens_E: np.ndarray, room_G: np.ndarray, speed_G: np.ndarray) -> np.ndarray:
    """Return the GPU of each expert: longest processing time first, within the room (ties: the lower number)."""
    load_G, room_G = np.zeros(len(room_G)), room_G.copy()
    gpu_E = np.zeros(len(tokens_E), np.int64)
    for expert in np.argsort(-tokens_E, kind="stable").tolist():
        after_G = np.where(room_G > 0, load_G + tokens_E[expert] / speed_G, np.inf)
        gpu = int(np.lexsort((np.arange(len(room_G)), load_G, after_G))[0])
        gpu_E[expert] = gpu
        load_G[gpu] += tokens_E[expert] / speed_G[gpu]
        room_G[gpu] -= 1
    return gpu_E
