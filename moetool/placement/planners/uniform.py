"""Uniform: equal numbers of consecutive experts on every GPU, the default of expert parallelism."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.planner import Problem, layer_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the uniform placement.

    Attributes:
        shuffle: choose the experts at random (as in Prism § IV-A) instead of by number.
    """

    shuffle: bool = False


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place E/G experts of each layer on each GPU, one copy each.

    If E is not divisible by G, the first GPUs hold one more. Experts that do not fit on a GPU are shared evenly among
    the others.

    Shapes: placed_GLE bool.

    Source: Megatron-LM's expert parallelism, as Prism § IV-A describes it.
    """
    rng = np.random.default_rng(problem.seed)
    room_GL = layer_slots(problem)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        order = rng.permutation(num_experts) if options.shuffle else np.arange(num_experts)
        start = 0
        for g, count in enumerate(even_shares(num_experts, room_GL[:, layer]).tolist()):
            placed_GLE[g, layer, order[start : start + count]] = True
            start += count
    return placed_GLE


def even_shares(num_experts: int, room_G: np.ndarray) -> np.ndarray:
    """Return slots as even as each GPU's memory allows; total memory must suffice."""
    share_G = np.zeros(len(room_G), np.int64)
    for _ in range(num_experts):
        share_G[int(np.where(share_G < room_G, share_G, num_experts + 1).argmin())] += 1
    return share_G
