"""Redundant: every expert once and as many copies as fit, at random."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.planner import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options."""


def place(problem: Problem, options: Options) -> np.ndarray:
    """Fill each GPU's memory with distinct random experts.

    Shapes: placed_GLE bool.

    Source: Prism § IV-A, baseline "Redundance". The paper does not say how every expert is covered: here each first
    goes to a random free slot, then the free slots are filled.
    """
    rng = np.random.default_rng(problem.seed)
    experts = np.argwhere(problem.exists_LE)
    slots = np.repeat(np.arange(len(problem.slots_G)), problem.slots_G)
    chosen = rng.permutation(len(slots))[: len(experts)]
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    placed_GLE[slots[chosen], experts[:, 0], experts[:, 1]] = True
    for g, room in enumerate(problem.slots_G.tolist()):
        absent = np.argwhere(problem.exists_LE & ~placed_GLE[g])
        more = absent[rng.permutation(len(absent))[: room - int(placed_GLE[g].sum())]]
        placed_GLE[g, more[:, 0], more[:, 1]] = True
    return placed_GLE
