"""DIRECTOR as printed: relaxation, bisection and rounding, without local search and copies."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.local_search import Layer
from moetool.placement.planner import Problem, layer_slots
from moetool.placement.planners.director import round_relaxation


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the rounded relaxation.

    Attributes:
        c_max: maximum experts of a layer on a GPU (0: as memory allows).
    """

    c_max: int = 0


def place(problem: Problem, options: Options) -> np.ndarray:
    """Round the relaxation of each layer.

    Shapes: placed_GLE bool.

    Source: DIRECTOR § VI, Algorithm 1, with the repairs of `moetool.placement.planners.director.place`, but without its
    additional steps. Their effect is the difference to the planner `director`.

    Raises:
        CapacityError: `c_max` does not cover every expert.
    """
    room_GL = layer_slots(problem, options.c_max)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for number, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE = np.ascontiguousarray(problem.demand.tokens_GLE[:, number, :num_experts])
        layer = Layer(tokens_GE=tokens_GE, room_G=room_GL[:, number], latency=problem.latency)
        gpu_E = round_relaxation(layer, np.random.default_rng([problem.seed, number]))
        placed_GLE[gpu_E, number, np.arange(num_experts)] = True
    return placed_GLE
