"""Prism's Eq. 2, solved exactly: the least remote calls of any placement that covers every expert within memory."""

from dataclasses import dataclass

import numpy as np

from moetool.base.errors import CapacityError
from moetool.placement.gpus import pack_servers
from moetool.placement.least_remote import optimum
from moetool.placement.planner import Problem

OBJECTIVE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the programme.

    Attributes:
        seconds: time limit of the simplex method (0: none).
    """

    seconds: float = 120.0


def place(problem: Problem, options: Options) -> np.ndarray:
    """Find the optimum of Eq. 2, then pack each server's experts onto its GPUs.

    Shapes: placed_GLE bool.

    Source: Prism § III-B, Eq. 2 with its two constraints. Basis and deviations:
        - Each variable is in one coverage row (an expert) and one capacity row (a server): the rows form the incidence
          matrix of a bipartite graph, which is totally unimodular, so every vertex that the dual simplex ends in is
          integral. This is asserted, without rounding.
        - Per-GPU memory needs no variable: a server gains nothing from two copies, and any set that fits the server's
          slots fits its GPUs. Slots have the size of the model's largest expert, so with experts of several sizes this
          is the optimum among placements by slots.
        - An idle server counts as uniform (`Demand.frequency_NLE`).

    Raises:
        CapacityError: there is no optimum within `seconds`.
    """
    try:
        return pack_servers(problem, optimum(problem, options.seconds)[1])
    except TimeoutError as error:
        raise CapacityError(
            f"prism_exact: {error} (seconds={options.seconds:g}); raise it with --set seconds=..., or use prism"
        ) from None
